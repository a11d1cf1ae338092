"""Replicas that compute prompts for others, and those that answer."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.emulator.time_model import TimeModel
from loadtest.simulator import Halves, PoolSetup, Setup, simulate
from loadtest.workload import Turn
from policies import Decision, Policy, Snapshot, create
from router.scheduling.queue import QueueRules
from tests.loadtest.simulator.workloads import SIZE, conversations, turn, workload

PLAIN = TimeModel(base_ms=1.0, ms_per_prefill_token=0.1, ms_per_decode=1.0)
SPLIT = Setup(
    num_replicas=0,
    halves=Halves(num_prefill=2, num_decode=2),
    num_blocks=400,
    load=None,
    time_model=PLAIN,
)
IDS = tuple(range(1, 11))


@pytest.mark.parametrize("pool", [None, PoolSetup(speed=20.0)])
@pytest.mark.parametrize("name", ["random", "mooncake", "kv_aware"])
def test_every_turn_is_answered_by_a_decode_replica(name: str, pool: PoolSetup | None) -> None:
    """Whatever places the prompts; and what was computed apart, a prefill replica has computed."""
    given = conversations(20)

    found = simulate(given, create(name), replace(SPLIT, num_blocks=120, pool=pool))

    turns = found.run.turns
    assert sorted((t.session_id, t.number) for t in turns) == sorted(t.key for t in given.turns)
    assert {t.replica for t in turns} <= {"d1", "d2"}
    assert found.num_apart == sum(t.prefill is not None for t in turns) > 0
    assert {t.prefill for t in turns if t.prefill} <= {"p1", "p2"}
    assert all(t.status == 200 and (t.num_cached_tokens or 0) < t.num_prompt_tokens for t in turns)
    computed = found.num_prompt_tokens - found.num_local_tokens - found.num_pool_tokens
    assert sum(use.num_computed_tokens for use in found.replicas) >= computed


def test_a_first_token_takes_its_prompt_its_transfer_and_one_step() -> None:
    """From replica to replica all but the last token is read, at the speed asked for."""
    asked = turn(0, 0.0, IDS)  # 5,130 tokens
    setup = replace(SPLIT, halves=Halves(num_prefill=1, num_decode=1, speed=10.0))

    found = simulate(workload(asked), create("kv_aware"), setup)

    [got] = found.run.turns
    prefill_s = 0.001 + 5_130 * 0.0001
    assert (got.prefill, got.replica) == ("p1", "d1")
    assert found.prefill_mean_s == pytest.approx(prefill_s)
    assert got.ttft_s == pytest.approx(prefill_s + 5_129 * 0.00001 + 0.001 + 0.0001)
    assert found.num_moved_tokens == 5_129
    assert got.total_s == pytest.approx((got.ttft_s or 0.0) + 19 * 0.002)


def test_the_pool_moves_whole_blocks() -> None:
    """What is behind the last full block is computed where it is decoded."""
    asked = turn(0, 0.0, IDS)
    setup = replace(SPLIT, pool=PoolSetup(speed=10.0))

    found = simulate(workload(asked), create("kv_aware"), setup)

    [got] = found.run.turns
    prefill_s = 0.001 + 5_130 * 0.0001
    assert found.num_moved_tokens == 10 * SIZE
    assert got.ttft_s == pytest.approx(prefill_s + 10 * SIZE * 0.00001 + 0.001 + 10 * 0.0001)


def test_a_decode_replica_saves_nothing() -> None:
    """A prompt that it computes itself is not in the pool, as of a `kv_consumer`."""
    asked = turn(0, 0.0, (1,))  # cheaper to compute than to read from a slow pool
    setup = replace(SPLIT, pool=PoolSetup(speed=0.01))
    slow = [turn(number, 40.0 * number, IDS[:2]) for number in range(30)]

    first = simulate(workload(asked), create("kv_aware"), setup)
    found = simulate(workload(*slow), create("kv_aware"), setup)

    assert first.num_apart == 1  # how slow it is has to be learned
    assert 0 < found.num_apart < 30
    assert found.num_pool_stored == 2


def test_a_prefill_replica_keeps_blocks_until_they_are_read() -> None:
    """While a slow transfer lasts, a cache of one prompt has no room for a second."""
    asked = [turn(0, 0.0, IDS), turn(1, 0.01, tuple(range(20, 30)))]
    halves = Halves(num_prefill=1, num_decode=1, speed=0.5)
    tight = replace(SPLIT, halves=halves, num_blocks=12)

    found = simulate(workload(*asked), create("kv_aware"), tight)

    first, second = sorted(found.run.turns, key=lambda t: t.session_id)
    read_s = 5_129 * 0.0002
    assert (first.ttft_s or 0.0) > read_s
    assert second.start_s + (second.ttft_s or 0.0) > (first.ttft_s or 0.0) + 0.5 + read_s


def test_decoding_is_not_held_up_by_others_prompts() -> None:
    """The longest tenth of times between tokens is a step's, where on one replica it is a chunk."""
    asked = [
        turn(0, 0.0, (1,), num_output_tokens=201),
        *(turn(n, 0.2 + 0.1 * n, tuple(range(10 * n, 10 * n + 8))) for n in range(1, 5)),
    ]
    whole = replace(SPLIT, num_replicas=1, halves=None)
    split = replace(SPLIT, halves=Halves(num_prefill=1, num_decode=1))

    tails = [
        {
            t.session_id: t.tbt_tail_s
            for t in simulate(workload(*asked), create("random"), s).run.turns
        }
        for s in (whole, split)
    ]

    assert (tails[0]["s0"] or 0.0) > 5 * (tails[1]["s0"] or 0.0)


def test_whole_replicas_beside_halves_take_requests_too() -> None:
    """Where all answer, those without a role compute what they answer."""
    setup = replace(SPLIT, num_replicas=2, load=2.0)

    found = simulate(conversations(30), create("kv_aware"), setup)

    by_replica = {t.replica: t.prefill for t in found.run.turns}
    assert set(by_replica) >= {"d1", "d2", "r1", "r2"}
    assert by_replica["r1"] is by_replica["r2"] is None


@pytest.mark.parametrize("num_routers", [1, 3])
def test_nothing_is_left_and_two_runs_are_equal(num_routers: int) -> None:
    """Also where several routers learn of both halves from one another."""
    setup = replace(SPLIT, num_routers=num_routers, note_lag_s=0.003, load=1.5, loop="closed")
    given = conversations(8)

    first, again = (simulate(given, create("kv_aware"), setup) for _ in range(2))

    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert len(first.run.turns) == len(given.turns)


def test_records_say_what_became_of_the_prompt() -> None:
    """A kept record decides again alike, and has the prompt's replica as a live one has."""
    found = simulate(conversations(5), create("kv_aware"), replace(SPLIT, keeps_records=True))

    assert found.records
    for record, got in zip(found.records, found.run.turns, strict=True):
        policy = create(record.policy, record.policy_params)
        assert policy.decide(record.snapshot) == record.decision
        assert record.decision.candidate == got.replica
        assert record.prefill is not None
        assert record.prefill.where == (got.prefill or "local")


def test_a_request_waits_for_the_replica_that_computes_its_prompt() -> None:
    """The queue's window is that of the prefill replicas: no one has two behind the one at work."""
    shown: list[int] = []

    class Watching(Policy, frozen=True, kw_only=True):
        name: ClassVar[str] = "watching"

        def decide(self, snapshot: Snapshot) -> Decision:
            shown.extend(view.num_waiting for view in snapshot.replicas if view.id.startswith("p"))
            return create("least_loaded").decide(snapshot)

    given = [turn(n, 0.001 * n, tuple(range(20 * n, 20 * n + 10))) for n in range(20)]

    for queue in (None, QueueRules()):
        shown.clear()
        found = simulate(workload(*given), Watching(), replace(SPLIT, queue=queue))
        assert len(found.run.turns) == 20
        assert (max(shown) > 4) is (queue is None)
    assert max(shown) == 2


def test_a_deadline_counts_the_prompts_queue() -> None:
    """What would wait too long at the prefill replicas is refused when it comes."""
    given = [
        replace(turn(n, 0.001 * n, tuple(range(20 * n, 20 * n + 10))), deadline_s=2.0)
        for n in range(30)
    ]

    found = simulate(workload(*given), create("kv_aware"), replace(SPLIT, queue=QueueRules()))

    answered = [t for t in found.run.turns if t.status == 200]
    assert 4 <= len(answered) < 15  # two replicas, some 0.5 s for each prompt
    assert all((t.ttft_s or 0.0) < 2.5 for t in answered)


def test_answers_wait_until_they_are_quick_enough() -> None:
    """Once engines have shown how fast they decode: then no more begin at once than may."""
    given = [
        turn(n, 0.2 * n, tuple(range(20 * n, 20 * n + 3)), num_output_tokens=400)
        for n in range(300)
    ]
    times = TimeModel(base_ms=5.0, ms_per_prefill_token=0.01, ms_per_decode=1.0)

    def late(limit_ms: float | None) -> list[float]:
        setup = replace(SPLIT, time_model=times, queue=QueueRules(tbt_ms=limit_ms, max_wait_s=20.0))
        found = simulate(workload(*given), create("kv_aware"), setup)
        answered = [t for t in found.run.turns if t.status == 200]
        refused = [t for t in found.run.turns if t.status != 200]
        assert {t.error_message for t in refused} <= {"too slow"}
        assert len(answered) >= 100
        assert bool(refused) is (limit_ms is not None)
        return sorted(t.tbt_mean_s or 0.0 for t in answered if t.start_s > 27.0)

    free, held = late(None), late(12.0)
    assert free[len(free) // 2] > 0.013
    assert held[-1] < 0.013


def test_a_half_needs_the_other() -> None:
    """As the live router refuses a role without a partner."""
    with pytest.raises(ValueError, match="0 prefill and 2 decode replicas: each needs the other"):
        Halves(num_prefill=0, num_decode=2)


@pytest.mark.parametrize("reads_metrics", [True, False])
def test_short_contexts_keep_away_from_a_long_one(reads_metrics: bool) -> None:
    """Two decode replicas with unequal work: the time between tokens that is learned from engines'
    metrics decides, where without it only requests are counted."""
    times = TimeModel(base_ms=5.0, ms_per_decode=0.01, ms_per_mtoken_context=400.0)
    setup = replace(
        SPLIT, time_model=times, load_interval_s=5.0 if reads_metrics else math.inf, seed=3
    )
    sizes = [(3, 40), (60, 1), (10, 4), (30, 2), (80, 1), (5, 20)]  # blocks, how many at once
    next_id = 1
    asked: list[Turn] = []
    for moment, (num_blocks, num) in enumerate(4 * sizes):
        for _ in range(num):
            ids = tuple(range(next_id, next_id + num_blocks))
            next_id += num_blocks
            asked.append(turn(len(asked), 30.0 * moment, ids, num_output_tokens=1_500))
    num_before, start_s = len(asked), 30.0 * 4 * len(sizes) + 60.0
    for number in range(7):  # one long, then six short: by number, half of them would join it
        ids = tuple(range(next_id, next_id + (2 if number else 200)))
        next_id += 200
        asked.append(turn(len(asked), start_s + 2.0 * number, ids, num_output_tokens=1_500))

    found = simulate(workload(*asked), create("kv_aware"), setup)

    by_session = {t.session_id: t.replica for t in found.run.turns}
    long, *short = [by_session[f"s{number}"] for number in range(num_before, len(asked))]
    assert (long in short) is not reads_metrics


def test_with_a_pool_prompts_may_still_come_from_peers() -> None:
    """Then all but the last token is read, and prefill replicas use the pool."""
    asked = [turn(0, 0.0, IDS), turn(1, 60.0, IDS)]
    halves = Halves(num_prefill=1, num_decode=1, by_peers=True)
    setup = replace(SPLIT, halves=halves, pool=PoolSetup(speed=10.0))

    found = simulate(workload(*asked), create("kv_aware"), setup)

    first = min(found.run.turns, key=lambda each: each.start_s)
    assert (first.ttft_s or 0.0) == pytest.approx(
        0.001 + 5_130 * 0.0001 + 5_129 * 0.00001 + 0.001 + 0.0001
    )
    assert found.num_pool_stored == 10


def test_always_apart_however_short_a_prompt_is() -> None:
    """Where reading is slower than computing, prompts are computed elsewhere none the less."""
    slow = [turn(number, 40.0 * number, IDS[:2]) for number in range(30)]
    halves = Halves(num_prefill=1, num_decode=1, speed=0.01, always_apart=True)

    found = simulate(workload(*slow), create("kv_aware"), replace(SPLIT, halves=halves))

    assert found.num_apart == 30


def test_decode_replicas_may_have_another_cache() -> None:
    """A prompt has to fit into the smaller one."""
    halves = Halves(num_prefill=1, num_decode=1, num_decode_blocks=8)

    found = simulate(workload(turn(0, 0.0, IDS)), create("kv_aware"), replace(SPLIT, halves=halves))

    assert [each.status for each in found.run.turns] == [400]
