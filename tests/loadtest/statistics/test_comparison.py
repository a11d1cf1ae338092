"""Differences with their spread: what may be called one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy  # its `stats` is imported by the first test that asks for it
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.results import TurnResult
from loadtest.statistics import MEASURES, Comparison, Measure, Round, compare, within_slo
from tests.loadtest.statistics.samples import session_turns, turn

TTFT = MEASURES["mean TTFT"]
P90 = MEASURES["TTFT P90"]
COMPUTED = MEASURES["computed tokens"]


def found(
    ours: list[TurnResult], theirs: list[TurnResult], name: str = "mean TTFT", seed: int = 0
) -> Comparison:
    compared = compare(MEASURES[name], "a", "b", [Round(ours=ours, theirs=theirs)], seed=seed)
    assert compared is not None
    return compared


def test_same_results_are_no_difference() -> None:
    """An arm against itself: ratio 1, difference 0, within the spread."""
    turns = session_turns()

    mean, percentile = found(turns, turns), found(turns, turns, "TTFT P90")

    assert mean.effect == mean.low == mean.high == 1.0
    assert percentile.effect == percentile.low == percentile.high == 0.0
    assert mean.verdict == percentile.verdict == "within the spread"
    assert mean.is_better is None


def test_half_in_every_session_is_less_and_the_other_way_more() -> None:
    """What holds for every session holds for any draw of them."""
    fast, slow = session_turns(0.1), session_turns(0.2)

    for name in ("mean TTFT", "TTFT P50", "TTFT P90", "TTFT P99"):
        assert found(fast, slow, name).verdict == "less"
        assert found(slow, fast, name).verdict == "more"
        assert math.isclose(found(fast, slow, name).ours / found(fast, slow, name).theirs, 0.5)
    assert found(fast, slow).is_better is True
    assert math.isclose(found(fast, slow, "TTFT P50").effect, -0.11)


def test_one_session_does_not_make_a_difference() -> None:
    """A total that one session carries is within the spread."""
    theirs = [turn(f"s{s}", ttft_s=5.0 if s == 0 else 0.1) for s in range(20)]
    ours = [turn(f"s{s}", ttft_s=0.1) for s in range(20)]

    compared = found(ours, theirs)

    assert compared.effect < 0.5
    assert compared.verdict == "within the spread"


def test_every_round_must_agree() -> None:
    """One round out of three that says otherwise, and the difference is spread."""
    fast, slow = session_turns(0.1), session_turns(0.2)
    pairs = [(fast, slow), (fast, slow), (slow, fast)]

    compared = compare(TTFT, "a", "b", [Round(ours=a, theirs=b) for a, b in pairs])

    assert compared is not None
    assert compared.rounds == (0.5, 0.5, 2.0)
    assert compared.verdict == "within the spread"
    assert compared.by_session.high < 1.0 < compared.high


def made_rounds(
    random: np.random.Generator, num_rounds: int, *, noise: float, effect: float = 1.0
) -> list[Round]:
    """Draw rounds of two arms whose runs each take some factor more or less, as a whole."""
    levels = random.lognormal(0.0, 0.5, size=16)
    arms = [
        [
            turn(f"s{s}", ttft_s=float(factor * level * np.exp(noise * shared) * own))
            for s, (level, own) in enumerate(zip(levels, owns, strict=True))
        ]
        for _ in range(num_rounds)
        for factor in (effect, 1.0)
        for shared in [random.normal()]
        for owns in [random.lognormal(0.0, 0.2, size=16)]
    ]
    return [Round(ours=arms[i], theirs=arms[i + 1]) for i in range(0, len(arms), 2)]


@pytest.mark.parametrize("num_rounds", [2, 4])
@pytest.mark.parametrize(
    ("name", "noise"), [("mean TTFT", 0.0), ("mean TTFT", 0.2), ("TTFT P50", 0.2)]
)
def test_equal_arms_are_called_different_no_more_often_than_promised(
    name: str, noise: float, num_rounds: int
) -> None:
    """Known truth, none: at most 5 % of 60 comparisons, within binomial error (P < 0.1 %)."""
    random = np.random.default_rng(21)

    verdicts = [
        found_in(MEASURES[name], made_rounds(random, num_rounds, noise=noise)).verdict
        for _ in range(60)
    ]

    num_false = sum(verdict != "within the spread" for verdict in verdicts)
    assert num_false <= scipy.stats.binom.ppf(0.999, 60, 0.05)


def test_a_known_effect_is_found() -> None:
    """60 % more, in four rounds of runs that vary by 5 %: nearly always.

    Rounds' effects vary by some 10 % here (16 turns a run), so by the noncentral t distribution
    99 % of such comparisons find it, and 88 % would find a third more.
    """
    random = np.random.default_rng(22)

    verdicts = [
        found_in(TTFT, made_rounds(random, 4, noise=0.05, effect=1.6)).verdict for _ in range(30)
    ]

    assert verdicts.count("more") >= 27


def found_in(measure: Measure, rounds: list[Round]) -> Comparison:
    compared = compare(measure, "a", "b", rounds)
    assert compared is not None
    return compared


def test_only_turns_that_succeeded_in_both_count() -> None:
    """A turn that failed in one arm makes neither look better, and is counted as left out."""
    ours = [turn("s0", 0, cached=500), turn("s0", 1, error="timeout"), turn("s1", cached=500)]
    theirs = [turn("s0", 0, cached=0), turn("s0", 1, cached=0), turn("s1", error="timeout")]

    compared = found(ours, theirs, "computed tokens")

    assert compared.effect == 0.5
    assert (compared.num_turns, compared.num_left_out) == (1, 2)


def test_goodput_counts_what_failed_or_never_came() -> None:
    """A failed turn is not good, nor are those that its session did not come to."""
    slo = within_slo(0.15, None)
    ours = [turn(f"s{s}", n) for s in range(8) for n in range(2)]
    theirs = [turn(f"s{s}", 0, error="connect" if s < 4 else None) for s in range(8)]

    whole = compare(slo, "a", "b", [Round(ours=ours, theirs=theirs)])
    part = compare(slo, "a", "b", [Round(ours=ours, theirs=theirs, is_complete=False)])

    assert whole is not None
    assert part is not None
    assert (whole.ours, whole.theirs, whole.num_turns) == (1.0, 0.25, 16)
    assert (part.ours, part.theirs, part.num_turns) == (1.0, 0.5, 8)
    assert whole.verdict == "more"
    assert whole.is_better is True


def test_slo_of_both_times() -> None:
    """Each bound given must be kept; a one-token reply has no time between tokens."""
    good = within_slo(0.2, 0.05).value

    assert good(turn("s", ttft_s=0.2, tbt_s=0.05)) == 1.0
    assert good(turn("s", ttft_s=0.3, tbt_s=0.05)) == 0.0
    assert good(turn("s", ttft_s=0.2, tbt_s=0.06)) == 0.0
    assert good(turn("s", ttft_s=0.2)) == 1.0
    assert good(turn("s", ttft_s=None)) == 0.0


def test_few_sessions_get_no_verdict() -> None:
    """Four sessions, however clear, are too few: the comparison says so."""
    compared = found(session_turns(0.1, num_sessions=4), session_turns(0.2, num_sessions=4))

    assert compared.verdict == "blurred"
    assert compared.blurred == "only 4 sessions in common"


def test_what_is_blurred_stays_so() -> None:
    """A reason given by the caller stands instead of a verdict."""
    rounds = [Round(ours=session_turns(0.1), theirs=session_turns(0.2))]

    compared = compare(TTFT, "a", "b", rounds, blurred="the driver was late")

    assert compared is not None
    assert compared.verdict == "blurred"


def test_nothing_to_compare_is_nothing() -> None:
    """No common turn, or nothing computed at all: no ratio."""
    failed = [turn("s0", error="timeout")]
    all_cached = [turn("s0", cached=1000)]

    assert compare(TTFT, "a", "b", [Round(ours=failed, theirs=failed)]) is None
    assert compare(COMPUTED, "a", "b", [Round(ours=all_cached, theirs=all_cached)]) is None
    assert compare(P90, "a", "b", []) is None


@settings(max_examples=40)
@given(st.lists(st.floats(0.01, 10.0), min_size=5, max_size=30), st.integers(0, 2**31))
def test_interval_is_an_interval_and_the_seed_decides(ttfts: list[float], seed: int) -> None:
    """The interval is ordered and within what was measured; the same seed draws the same."""
    ours = [turn(f"s{s}", ttft_s=ttft) for s, ttft in enumerate(ttfts)]
    theirs = [turn(f"s{s}", ttft_s=1.0) for s in range(len(ttfts))]

    for name in ("mean TTFT", "TTFT P50"):
        one = found(ours, theirs, name, seed)
        shift = 0.0 if one.kind == "ratio" else 1.0
        assert min(ttfts) * 0.999 <= one.low + shift <= one.high + shift <= max(ttfts) * 1.001
        assert one == found(ours, theirs, name, seed)
