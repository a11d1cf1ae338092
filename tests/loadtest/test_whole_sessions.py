"""Whole sessions: measured over their turns, and paired."""

from __future__ import annotations

import pytest

from loadtest.statistics import MEASURES, Round, pair
from loadtest.whole_sessions import session_times, whole_sessions
from tests.loadtest.statistics.samples import turn


def test_a_session_lasts_from_its_first_request_to_its_last_answer() -> None:
    """Pauses and sub-agents are in it; warm-up turns are not, and a failed session did not end."""
    turns = [
        turn("s0", 0, start_s=1.0, ttft_s=0.8),
        turn("s0.1.0", 0, start_s=3.0, ttft_s=6.8),
        turn("s0", 1, start_s=5.0, ttft_s=0.8),
        turn("s1", 0, start_s=0.0, is_warm_up=True),
        turn("s1", 1, start_s=2.0, ttft_s=0.3),
        turn("s2", 0, start_s=0.0),
        turn("s2", 1, start_s=1.0, error="http_503"),
    ]

    found = whole_sessions(turns)

    assert {root: (round(w.took_s, 6), w.num_turns) for root, w in found.items()} == {
        "s0": (9.0, 3),
        "s1": (0.5, 1),
    }


def test_times_are_summed_up_over_runs() -> None:
    """A session that ran twice counts twice; of no whole session there are no times."""
    runs = [[turn("s0", start_s=0.0, ttft_s=seconds - 0.2)] for seconds in (1.0, 3.0)]

    times = session_times(runs)

    assert times is not None
    assert (times.num_sessions, times.mean_s, times.longest_s) == (2, 2.0, 3.0)
    assert session_times([[turn("s0", error="timeout")]]) is None


def test_only_sessions_with_the_same_turns_are_paired() -> None:
    """One that a stopped run cut short would look quick."""
    long = [turn("a", 0, start_s=0.0), turn("a", 1, start_s=9.0, ttft_s=0.8), turn("b")]
    cut = [turn("a", 0, start_s=0.0), turn("b", ttft_s=0.2)]

    pairs = pair(MEASURES["mean session"], [Round(ours=long, theirs=cut, is_complete=False)])

    assert (pairs.ours.tolist(), pairs.theirs.tolist()) == (
        [pytest.approx(0.3)],
        [pytest.approx(0.4)],
    )
    assert pairs.num_left_out == 1
