"""Rounds of a simulation: what differs between them, and what does not."""

from __future__ import annotations

from loadtest.generated import Agents
from loadtest.simulator import Setup
from loadtest.simulator.arms import arms_of
from loadtest.simulator.rounds import half_of_the_blocks, simulate_rounds, varied

WORKLOAD = Agents(num_sessions=6, num_turns=2, scale_tokens=0.05).workload()


def test_a_varied_workload_is_the_same_but_for_bytes_and_a_millisecond() -> None:
    """Same turns, same repeats, at most 1 ms later; the first round is the workload itself."""
    other = varied(WORKLOAD, 2, seed=1)

    assert varied(WORKLOAD, 1, seed=1) is WORKLOAD
    assert other == varied(WORKLOAD, 2, seed=1)
    before = {turn.key: turn for turn in WORKLOAD.turns}
    renamed: dict[int, int] = {}
    for turn in other.turns:
        was = before.pop(turn.key)
        assert (turn.num_input_tokens, turn.after) == (was.num_input_tokens, was.after)
        assert 0.0 <= turn.arrival_s - was.arrival_s <= 1e-3
        for old, new in zip(was.hash_ids, turn.hash_ids, strict=True):
            assert renamed.setdefault(old, new) == new
    assert not before
    assert len(set(renamed.values())) == len(renamed)
    assert renamed.keys().isdisjoint(renamed.values())


def test_rounds_differ_a_little_and_repeat_exactly() -> None:
    """Seeded: the same round is the same run; another one is another."""
    arms = arms_of(["least_loaded"])
    setup = Setup(num_replicas=2, load=2.0)

    (one, two), is_complete = simulate_rounds(WORKLOAD, arms, setup, 2)
    (again,), _ = simulate_rounds(WORKLOAD, arms, setup)

    assert is_complete
    assert one.run == again.run
    assert one.run.turns != two.run.turns
    assert (one.run.info.round, two.run.info.round) == (1, 2)
    assert two.run.info.workload == WORKLOAD.name


def test_unlimited_never_evicts_and_the_queue_is_the_routers() -> None:
    """`kv_aware` has its queue, `queue.mode=off` has none."""
    setup = Setup(num_replicas=2, num_blocks=half_of_the_blocks(WORKLOAD, 2), load=2.0)

    done, _ = simulate_rounds(
        WORKLOAD, arms_of(["kv_aware,kv_aware:queue.mode=off,unlimited"]), setup
    )

    assert [one.setup.queue is not None for one in done] == [True, False, True]
    assert sum(use.num_evicted_blocks for use in done[0].replicas) > 0
    assert sum(use.num_evicted_blocks for use in done[2].replicas) == 0
