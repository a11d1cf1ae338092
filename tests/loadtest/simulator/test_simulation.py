from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from hashlib import sha256
from itertools import accumulate
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.engine_model.time_model import TimeModel
from loadtest.simulator import PoolSetup, Setup, Simulated, TierSetup, simulate
from loadtest.simulator.setup import coarsened, offered_work_s, stretch
from loadtest.workload import Turn
from policies import POLICIES, Decision, Policy, Snapshot, create
from tests.loadtest.simulator.workloads import SIZE, conversations, turn, workload

SMALL = Setup(num_replicas=3, num_blocks=120, load=0.9)
PLAIN = TimeModel(base_ms=1.0, ms_per_prefill_token=0.1, ms_per_decode=1.0)
ALONE = Setup(num_replicas=1, num_blocks=400, load=None, time_model=PLAIN)


def digest(simulated: Simulated) -> str:
    return sha256(msgspec.json.encode(simulated)).hexdigest()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_answers_every_turn(name: str) -> None:
    """All turns come back once, with tokens from somewhere, and nothing is left in flight."""
    given = conversations(20)

    found = simulate(given, create(name), replace(SMALL, pool=PoolSetup(speed=5.0)))

    turns = found.run.turns
    assert sorted((t.session_id, t.number) for t in turns) == sorted(t.key for t in given.turns)
    assert all(t.status == 200 and (t.ttft_s or 0.0) > 0.0 for t in turns)
    assert all((t.num_cached_tokens or 0) < (t.num_prompt_tokens or 0) for t in turns)
    cached = sum(t.num_cached_tokens or 0 for t in turns)
    assert found.num_local_tokens + found.num_pool_tokens == cached
    computed = sum(use.num_computed_tokens for use in found.replicas)
    assert computed >= found.num_prompt_tokens - cached
    assert found.summary.num_errors == 0


def test_two_runs_are_equal_and_seeds_are_not() -> None:
    """The same seed gives the same bytes; another one another choice."""
    given, policy = conversations(), create("random")

    first, again = simulate(given, policy, SMALL), simulate(given, policy, SMALL)
    other = simulate(given, policy, replace(SMALL, seed=1))

    assert digest(first) == digest(again)
    assert first.run.turns != other.run.turns


_SCRIPT = """
from hashlib import sha256
import msgspec
from loadtest.simulator import PoolSetup, Setup, simulate
from policies import create
from tests.loadtest.simulator.workloads import conversations
setup = Setup(num_replicas=3, num_blocks=60, pool=PoolSetup(speed=5.0), num_routers=2)
found = simulate(conversations(15), create("kv_aware"), setup)
print(sha256(msgspec.json.encode(found)).hexdigest())
"""


@pytest.mark.timeout(300)  # two processes that import everything
def test_hash_seed_changes_nothing() -> None:
    """Processes that hash text differently find the same."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(found) == 1


def test_one_request_takes_what_the_time_model_says() -> None:
    """Chunks of a prefill, then a step for each further token."""
    asked = turn(0, 0.0, tuple(range(1, 21)))  # 10,250 tokens: chunks of 8,192 and 2,058

    (found,) = simulate(workload(asked), create("kv_aware"), ALONE).run.turns

    assert found.ttft_s == pytest.approx(2 * 0.001 + 10_250 * 0.0001)
    assert found.total_s == pytest.approx((found.ttft_s or 0.0) + 19 * 0.002)
    assert found.tbt_mean_s == pytest.approx(0.002)
    assert found.tbt_tail_s == pytest.approx(0.002)


def test_a_prefill_shows_in_the_tail_of_times_between_tokens() -> None:
    """Another's chunk between two tokens is in the longest tenth, not in the others."""
    asked = [
        turn(0, 0.0, (1,), num_output_tokens=201),
        turn(1, 0.2, (2, 3, 4, 5, 6, 7, 8)),
    ]

    found = {t.session_id: t for t in simulate(workload(*asked), create("random"), ALONE).run.turns}

    step, chunk = 0.002, 0.002 + 3594 * 0.0001  # 20 of 200 are the tail
    assert found["s0"].tbt_tail_s == pytest.approx((chunk + 19 * 0.003) / 20)
    assert found["s0"].tbt_mean_s == pytest.approx((chunk + 19 * 0.003 + 180 * step) / 200)


def test_a_closed_loop_waits_for_the_answer_and_the_tool() -> None:
    """A turn is sent `wait_s` after the last of those it comes after."""
    asked = [
        turn(0, 0.0, (1,)),
        turn(1, 0.0, (2, 3), num_output_tokens=90),
        turn(2, 0.001, (4,), after=(("s0", 0), ("s1", 0)), wait_s=7.0),
        turn(3, 0.002, (5,), after=(("s2", 0), ("s2", 0)), wait_s=0.5),
    ]

    turns = simulate(workload(*asked), create("random"), replace(ALONE, loop="closed")).run.turns

    ends = {t.session_id: t.start_s + t.total_s for t in turns}
    starts = {t.session_id: t.start_s for t in turns}
    assert starts["s2"] == pytest.approx(max(ends["s0"], ends["s1"]) + 7.0)
    assert starts["s3"] == pytest.approx(ends["s2"] + 0.5)


def test_an_open_loop_comes_at_the_pace_of_the_load() -> None:
    """Arrivals are stretched so that uncached work is `load` of what the fleet can do."""
    given = conversations()

    found = simulate(given, create("random"), SMALL)

    starts = [t.start_s for t in found.run.turns]
    span_s = max(starts) - min(starts)
    assert offered_work_s(given, SMALL) / (3 * span_s) == pytest.approx(0.9)
    assert found.stretch == pytest.approx(span_s / given.span_s)
    assert stretch(given, replace(SMALL, load=None)) == 1.0


def test_what_never_fits_is_refused_as_an_engine_does() -> None:
    """A turn larger than the cache is answered by a 400, and those behind it go on."""
    asked = [
        turn(0, 0.0, tuple(range(500))),
        turn(1, 1.0, (1,), after=(("s0", 0),), wait_s=1.0),
    ]

    refused, good = simulate(
        workload(*asked), create("random"), replace(ALONE, loop="closed")
    ).run.turns

    assert (refused.status, refused.error) == (400, "http_400")
    assert "room for 204800" in (refused.error_message or "")
    assert good.status == 200


def test_what_others_computed_is_read_from_the_pool() -> None:
    """Round robin finds nothing of its own: with a pool it reads all, without it none."""
    ids = tuple(range(1, 11))
    asked = [turn(number, 5.0 * number, ids) for number in range(3)]
    fleet = replace(ALONE, num_replicas=3)
    pool = PoolSetup(speed=10.0, num_links=3.0)

    found = simulate(workload(*asked), create("round_robin"), replace(fleet, pool=pool))
    without = simulate(workload(*asked), create("round_robin"), fleet)

    predicted = [t.predicted for t in found.run.turns]
    assert [p.pool if p else None for p in predicted] == [0, 10 * SIZE, 10 * SIZE]
    assert [p.gpu if p else None for p in predicted] == [0, 0, 0]
    assert found.run.turns[1].ttft_s == pytest.approx(10 * SIZE * 0.00001 + 0.001 + 10 * 0.0001)
    assert without.num_local_tokens == without.num_pool_tokens == 0


def test_readers_compete_for_the_pool() -> None:
    """Three at once on one link take three times as long as one alone."""
    ids = tuple(range(1, 11))
    asked = [turn(0, 0.0, ids), *(turn(number, 5.0, ids) for number in (1, 2, 3))]
    fleet = replace(ALONE, num_replicas=4, pool=PoolSetup(speed=10.0, num_links=1.0))

    turns = simulate(workload(*asked), create("round_robin"), fleet).run.turns

    for found in turns[1:]:
        assert found.ttft_s == pytest.approx(3 * 10 * SIZE * 0.00001 + 0.001 + 10 * 0.0001)


def test_siblings_join_the_one_that_computes_their_prefix() -> None:
    """Owned speculation: a request that comes while the prefix is computed is sent there, too."""
    ids = tuple(range(1, 60))
    asked = [turn(number, 0.01 * number, ids) for number in range(6)]
    fleet = replace(ALONE, num_replicas=3, event_lag_s=5.0)

    found = simulate(workload(*asked), create("kv_aware"), fleet)

    assert len({t.replica for t in found.run.turns}) == 1
    assert sum(t.num_cached_tokens or 0 for t in found.run.turns) == 5 * 59 * SIZE


def test_goodput_counts_turns_within_both_limits() -> None:
    """A first token too late, or a tail too long, is not good."""
    asked = [turn(0, 0.0, (1,)), turn(1, 10.0, tuple(range(2, 100)))]

    def num_good(**limits: float) -> int:
        setup = msgspec.structs.replace(ALONE, **limits)
        return simulate(workload(*asked), create("random"), setup).num_good

    assert num_good() == 2
    assert num_good(slo_ttft_s=1.0) == 1
    assert num_good(slo_tbt_s=0.0019) == 0


def test_joined_blocks_name_the_same_prefixes() -> None:
    """Every second id names blocks of twice the size; a partial one at the end is kept."""
    given = replace(workload(turn(0, 0.0, (1, 2, 3, 4, 5))), block_size=SIZE)

    joined = coarsened(given, 2)

    assert joined.block_size == 2 * SIZE
    assert joined.turns[0].hash_ids == (2, 4, 10**9)
    assert coarsened(given, 1) is given


def test_one_replica_is_a_queue_first_come_first_served() -> None:
    """Prompts of one step each wait for what is left of those before (Lindley's recursion)."""
    dice = random.Random(4)
    arrivals_s = list(accumulate(dice.expovariate(1.0) for _ in range(100)))
    asked = [
        turn(number, at_s, tuple(range(16 * number, 16 * number + 16)), num_input_tokens=16 * SIZE)
        for number, at_s in enumerate(arrivals_s)
    ]
    step = TimeModel(base_ms=10.0, ms_per_prefill_token=0.1)

    found = simulate(
        workload(*asked), create("random"), replace(ALONE, time_model=step, decodes=False)
    )

    service_s, free_s = 0.01 + 16 * SIZE * 0.0001, 0.0
    for at_s, got in zip(arrivals_s, found.run.turns, strict=True):
        free_s = max(at_s, free_s) + service_s
        assert got.ttft_s == pytest.approx(free_s - at_s)


class First(Policy, frozen=True, kw_only=True):
    """Sends everything to the first replica and keeps what it was shown of it."""

    name: ClassVar[str] = "first"
    shown: list[tuple[int, bool, int]]

    def decide(self, snapshot: Snapshot) -> Decision:
        first = snapshot.replicas[0]
        self.shown.append((first.num_requests, first.queue_ms > 0.0, first.num_gpu_tokens))
        return Decision(candidate=first.id, reason="first")


@pytest.mark.parametrize("note_lag_s", [0.0, 0.002, math.inf])
def test_what_others_sent_is_not_known_in_time(note_lag_s: float) -> None:
    """Neither their place in the queue nor what they are computing; one's own is, at once."""
    asked = [turn(number, 0.001 * number, (1, 2, 3)) for number in range(12)]
    fleet = replace(ALONE, num_replicas=2, num_routers=2, note_lag_s=note_lag_s, event_lag_s=60.0)
    policy = First(shown=[])

    simulate(workload(*asked), policy, fleet)

    dice = random.Random(fleet.seed)
    routers = [dice.choice(range(2)) for _ in asked]
    for number, shown in enumerate(policy.shown):
        known = [
            n
            for n in range(number)
            if routers[n] == routers[number] or asked[n].arrival_s + note_lag_s <= 0.001 * number
        ]
        assert shown == (len(known), bool(known), 3 * SIZE if known else 0)


def test_nothing_to_do() -> None:
    """An empty workload is simulated, too."""
    found = simulate(workload(), create("random"), SMALL)

    assert found.run.turns == ()
    assert found.good_ratio == found.goodput == found.local_ratio == 0.0


def test_turns_without_tokens_are_one_token() -> None:
    """Zero lengths, which traces have, are taken for the least an engine accepts."""
    asked = Turn(
        session_id="s",
        number=0,
        arrival_s=0.0,
        num_input_tokens=0,
        num_output_tokens=0,
        hash_ids=(),
    )

    (found,) = simulate(workload(asked), create("kv_aware"), ALONE).run.turns

    assert (found.num_prompt_tokens, found.num_output_tokens) == (1, 1)


def test_a_cpu_tier_gives_back_what_the_cache_evicted() -> None:
    """With a tier that holds all, only what is new is computed, and routers predict it exactly."""
    given = conversations(20)
    ample = simulate(given, create("session_sticky"), replace(SMALL, num_blocks=5_000))
    small = replace(SMALL, tier=TierSetup(num_blocks=5_000, speed=10.0))

    without = simulate(given, create("session_sticky"), SMALL)
    found = simulate(given, create("session_sticky"), small)

    assert found.summary.num_errors == found.num_mispredicted == 0
    assert without.num_prompt_tokens - without.num_local_tokens > found.summary.num_computed_tokens
    assert found.num_cpu_tokens > 0
    assert found.num_pool_tokens == 0
    assert found.num_local_tokens + found.num_cpu_tokens == ample.num_local_tokens


def test_reading_from_a_cpu_tier_takes_its_time() -> None:
    """A prompt that was evicted is read at the tier's speed, then its rest is computed."""
    fleet = replace(ALONE, num_blocks=21, tier=TierSetup(num_blocks=100, speed=10.0))
    asked = [
        turn(n, 5.0 * n, tuple(range(first, first + 20))) for n, first in enumerate((1, 40, 1))
    ]

    *_, again = simulate(workload(*asked), create("random"), fleet).run.turns

    num_read = 20 * SIZE
    assert again.num_cached_tokens == num_read
    assert again.predicted is not None
    assert again.predicted.cpu == num_read
    rest = (again.num_prompt_tokens or 0) - num_read
    assert again.ttft_s == pytest.approx(num_read * 0.00001 + 0.001 + rest * 0.0001)


def test_a_cpu_tier_goes_neither_with_a_pool_nor_with_halves() -> None:
    with pytest.raises(ValueError, match="not with a pool"):
        replace(SMALL, tier=TierSetup(num_blocks=10), pool=PoolSetup(speed=5.0))
    with pytest.raises(ValueError, match="at least 1"):
        TierSetup(num_blocks=0)
