"""Loads beyond the caches: how many sessions they are, and what a run comes to."""

from __future__ import annotations

import pytest

from loadtest.agents import plan_session
from loadtest.dev.peers.collapse import (
    LOADS,
    Counted,
    Load,
    lay_out,
    mean_context,
    num_alive,
    profile_of,
    run_of,
    sessions_of,
    simulated,
)
from loadtest.results import TurnResult

KEPT_UP = Load(pressure=1.0)
BATCH = Load(pressure=1.0, is_batch=True)
EQUAL = (Counted(num_prompt_tokens=1_000, num_cached_tokens=900),) * 2


def turn(
    session_id: str, start_s: float, total_s: float = 1.0, error: str | None = None
) -> TurnResult:
    return TurnResult(
        session_id=session_id,
        number=0,
        start_s=start_s,
        total_s=total_s,
        ttft_s=total_s / 2,
        num_output_tokens=10,
        error=error,
    )


def test_a_load_of_one_fills_the_caches() -> None:
    """In the mean over their lives, and twice the load has twice the sessions."""
    profile = profile_of()
    num_sessions = num_alive(KEPT_UP, 4, profile)

    assert num_sessions * mean_context(profile) == pytest.approx(4 * 1_199 * 32, rel=0.03)
    assert num_alive(Load(pressure=2.0), 4, profile) == pytest.approx(2 * num_sessions, abs=1)


def test_sessions_follow_those_that_end_unless_it_is_a_batch() -> None:
    """The first ones start within four seconds, the others at once when there is a place."""
    profile = profile_of()
    many, few = sessions_of(KEPT_UP, 4, profile), sessions_of(BATCH, 4, profile)
    starts_s = [session.next_turn().wait_s for session in many]  # type: ignore[union-attr]

    assert (len(many), len(few)) == (12, 4)
    assert starts_s[:4] == [0.0, 1.0, 2.0, 3.0]
    assert set(starts_s[4:]) == {0.0}
    assert many[5].num_turns == len(plan_session(profile, 5))


def test_turns_are_counted_while_all_sessions_are_alive() -> None:
    """From when the first ones have settled until the last one starts."""
    turns = [turn("a", 0.0), turn("a", 9.0), turn("b", 12.0), turn("c", 20.0), turn("c", 30.0)]

    found = run_of("x", "emulated", KEPT_UP, 2, turns, EQUAL)

    assert found.turns_per_s == pytest.approx(2 / 12)  # from 8 to 20 s: those that end at 10 and 13
    assert found.output_per_s == pytest.approx(20 / 12)


def test_a_batch_is_counted_to_its_end() -> None:
    """What idles while the last sessions end counts."""
    found = run_of("x", "emulated", BATCH, 2, [turn("a", 0.0), turn("b", 9.0)], EQUAL)

    assert found.turns_per_s == pytest.approx(2 / 10)


def test_failed_turns_and_uneven_engines_show() -> None:
    """Of three turns one has timed out; one engine computes three times as much as the other."""
    counted = (
        Counted(num_prompt_tokens=1_000, num_cached_tokens=400),
        Counted(num_prompt_tokens=1_000, num_cached_tokens=800),
    )
    turns = [turn("a", 0.0), turn("b", 1.0), turn("c", 0.0, 120.0, error="timeout")]

    found = run_of("x", "real", BATCH, 3, turns, counted)

    assert (found.num_turns, found.num_errors) == (2, 1)
    assert (found.hits, found.worst_hits) == (pytest.approx(0.6), pytest.approx(0.4))
    assert found.busiest == pytest.approx(1.5)
    assert found.longest_wait_s == 0.5


def test_a_run_without_an_answer_is_an_error() -> None:
    """It has no figures."""
    with pytest.raises(RuntimeError, match="no turn succeeded"):
        run_of("x", "real", BATCH, 1, [turn("a", 0.0, error="timeout")], EQUAL)


def test_the_peak_is_of_the_same_router_and_kind_of_load() -> None:
    """At twice the load nothing is done in time, of a batch all."""
    kept = [turn("a", 0.0), turn("a", 3.0), turn("b", 4.0)]
    runs = [
        run_of("x", "emulated", KEPT_UP, 2, kept, EQUAL),
        run_of("x", "emulated", Load(pressure=2.0), 2, [*kept[:1], *kept[2:]], EQUAL),
        run_of("x", "emulated", BATCH, 2, kept[:1], EQUAL),
        run_of("y", "real", BATCH, 2, kept[:1], EQUAL),
    ]

    rows = [line.split(" | ") for line in lay_out(runs).splitlines() if line.startswith("| ")]

    assert [row[4] for row in rows if row[1] == "`x`"] == ["100%", "0%", "100%"]
    assert len({load.name for load in LOADS}) == len(LOADS)


def test_a_row_has_the_mean_of_its_seeds_and_the_worst() -> None:
    """A wait that only one seed has is not averaged away."""
    runs = [
        run_of("x", "simulated", BATCH, 1, [turn("a", 0.0, total_s)], EQUAL, seed)
        for seed, total_s in ((1, 1.0), (2, 4.0))
    ]

    *_, row = lay_out(runs).splitlines()

    assert row.startswith("| 1-batch | `x` | 0 | 0.6 | 100% |")  # 1 and 0.25 turns a second
    assert row.endswith("| 1.25, 1.2 s | 2 s |")


def test_the_simulator_plays_every_turn_on_every_engine() -> None:
    """The same sessions as before real engines, as blocks."""
    found = simulated("session_sticky", Load(pressure=0.3, is_batch=True), 1, num_engines=2)
    profile = profile_of(1)

    assert found.num_errors == 0
    assert found.num_sessions == num_alive(Load(pressure=0.3), 2, profile)
    plans = [plan_session(profile, index) for index in range(found.num_sessions)]
    assert found.num_turns == sum(map(len, plans))
    assert found.busiest < 2.0
    assert 0.5 < found.worst_hits <= found.hits < 1.0
