"""Replicas that compute prompts for others, and those that answer."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.engine_model.time_model import TimeModel
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
    """The longest tenth of inter-token latencies is a step's; on one replica it is a chunk."""
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


def test_a_half_needs_the_other() -> None:
    """As the live router refuses a role without a partner."""
    with pytest.raises(ValueError, match="0 prefill and 2 decode replicas: each needs the other"):
        Halves(num_prefill=0, num_decode=2)


def test_short_contexts_keep_away_from_a_long_one() -> None:
    """The inter-token latency that engines report decides, not the number of requests."""
    times = TimeModel(base_ms=5.0, ms_per_decode=0.01, ms_per_mtoken_context=400.0)
    setup = replace(SPLIT, time_model=times, seed=3)
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
    assert long not in short
