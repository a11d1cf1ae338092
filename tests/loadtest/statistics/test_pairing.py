"""Turns are paired with themselves, sessions drawn with all that hangs on them."""

from __future__ import annotations

from loadtest.statistics import MEASURES, Round, num_differing_tokens, pair
from loadtest.whole_sessions import roots
from tests.loadtest.statistics.samples import turn

TTFT = MEASURES["mean TTFT"]


def test_a_turn_is_paired_with_itself_in_its_round() -> None:
    """Session, number and round must be the same; order does not matter."""
    first = Round(
        ours=[turn("a", 0, ttft_s=1.0), turn("a", 1, ttft_s=2.0)],
        theirs=[turn("a", 1, ttft_s=20.0), turn("a", 0, ttft_s=10.0)],
    )
    second = Round(ours=[turn("a", 0, ttft_s=3.0)], theirs=[turn("a", 0, ttft_s=30.0)])

    pairs = pair(TTFT, [first, second])

    assert pairs.ours.tolist() == [1.0, 2.0, 3.0]
    assert pairs.theirs.tolist() == [10.0, 20.0, 30.0]
    assert pairs.round.tolist() == [0, 0, 1]
    assert pairs.cluster.tolist() == [0, 0, 0]


def test_warm_up_is_no_turn() -> None:
    """Turns sent to warm up are neither paired nor left out."""
    turns = [turn("a", 0, is_warm_up=True), turn("a", 1)]

    pairs = pair(TTFT, [Round(ours=turns, theirs=turns)])

    assert (len(pairs.ours), pairs.num_left_out) == (1, 0)


def test_sub_agents_count_as_their_parent() -> None:
    """However deep; a dot in a name that is no session's child is only a dot."""
    ids = ["s0", "s0.1.0", "s0.1.0.2.1", "s10", "trace.7", "trace.8"]

    assert roots(ids) == {
        "s0": "s0",
        "s0.1.0": "s0",
        "s0.1.0.2.1": "s0",
        "s10": "s10",
        "trace.7": "trace.7",
        "trace.8": "trace.8",
    }


def test_an_engine_that_reports_no_cached_tokens_is_not_taken_to_compute_all() -> None:
    """Recomputed tokens are left out where the engine did not report them."""
    silent = [turn("a", cached=None)]

    pairs = pair(MEASURES["computed tokens"], [Round(ours=silent, theirs=[turn("a")])])

    assert (len(pairs.ours), pairs.num_left_out) == (0, 1)


def test_other_tokens_in_another_run_are_noticed() -> None:
    """Lengths of prompt and reply must be the same in every run; failed turns say nothing."""
    one = [turn("a", 0), turn("a", 1, prompt=1200), turn("b", 0), turn("c", 0)]
    two = [turn("a", 0), turn("a", 1, prompt=1300), turn("b", error="timeout")]
    three = [turn("c", 0, output=21), turn("a", 0, prompt=None)]

    assert num_differing_tokens([one, one]) == (0, 0)
    assert num_differing_tokens([one, two, three]) == (1, 1)
