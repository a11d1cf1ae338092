"""Differences with their spread: what may be called one.

Turns are paired with themselves, sessions drawn with all that hangs on them.

Intervals that hold the truth as often as they promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy  # its `stats` is imported by the first test that asks for it
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.results import TurnResult
from loadtest.statistics import (
    MEASURES,
    Comparison,
    Measure,
    Round,
    compare,
    num_differing_tokens,
    pair,
    within_slo,
)
from loadtest.statistics.bootstrap import (
    Floats,
    Interval,
    Ints,
    by_round,
    difference_of_percentiles,
    percentile,
    ratio_of_means,
    student_t,
)
from loadtest.whole_sessions import roots
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


NUM_TRIALS = 120

Draw = Callable[[np.random.Generator, int], tuple[Floats, Floats, Ints]]


def made_sessions(random: np.random.Generator, num: int) -> tuple[Floats, Floats, Ints]:
    """Draw sessions of 1 to 8 turns that hang together; ours takes 0.8 times as long."""
    cluster = np.repeat(np.arange(num), random.integers(1, 9, size=num))
    level = random.lognormal(0.0, 0.5, size=num)[cluster]
    ours = 0.8 * level * random.lognormal(0.0, 0.3, size=len(cluster))
    theirs = level * random.lognormal(0.0, 0.3, size=len(cluster))
    return ours, theirs, cluster


def is_of_95_percent(num_held: int) -> bool:
    """Return whether a right 95 % interval may have held so often: 0.1 % of them do not."""
    low, high = scipy.stats.binom.interval(0.999, NUM_TRIALS, 0.95)
    return bool(low <= num_held <= high)


@pytest.mark.parametrize("num_clusters", [12, 60])
def test_interval_of_a_ratio_holds_the_truth_as_often_as_promised(num_clusters: int) -> None:
    """Known truth 0.8, sessions drawn again each time: within binomial error of 95 %."""
    random = np.random.default_rng(11)
    num_held = 0
    for trial in range(NUM_TRIALS):
        interval = ratio_of_means(*made_sessions(random, num_clusters), num_clusters, seed=trial)
        num_held += interval.low <= 0.8 <= interval.high

    assert is_of_95_percent(num_held)


def test_interval_of_a_median_holds_the_truth_as_often_as_promised() -> None:
    """Medians of log-normal times are known: exp(mu) less exp(nu)."""
    random = np.random.default_rng(12)
    num_held = 0
    truth = 0.8 - 1.0
    for trial in range(NUM_TRIALS):
        ours, theirs, cluster = made_sessions(random, 60)
        interval = difference_of_percentiles(ours, theirs, cluster, 60, 0.5, seed=trial)
        num_held += interval.low <= truth <= interval.high

    assert is_of_95_percent(num_held)


def test_turns_of_one_session_are_no_independent_evidence() -> None:
    """Ten copies of every turn do not shorten the interval."""
    ours, theirs, cluster = made_sessions(np.random.default_rng(5), 40)

    once = ratio_of_means(ours, theirs, cluster, 40, seed=1)
    often = ratio_of_means(
        np.repeat(ours, 10), np.repeat(theirs, 10), np.repeat(cluster, 10), 40, seed=1
    )

    assert once.low == pytest.approx(often.low)
    assert once.high == pytest.approx(often.high)


def test_percentiles_draw_what_drawing_by_hand_draws() -> None:
    """The weighted percentile is the plain one of the repeated values."""
    values = np.array([5.0, 1.0, 3.0, 2.0])
    interval = difference_of_percentiles(
        values, np.zeros(4), np.array([0, 0, 1, 1]), 2, 0.5, seed=0
    )

    drawn = [[5, 1, 5, 1], [5, 1, 3, 2], [3, 2, 3, 2]]
    assert interval == Interval(
        low=min(percentile(np.array(d, float), 0.5) for d in drawn),
        high=max(percentile(np.array(d, float), 0.5) for d in drawn),
    )


@pytest.mark.parametrize("num_freedoms", [1, 2, 3, 4, 5, 11, 59, 1999])
def test_student_without_scipy_is_students(num_freedoms: int) -> None:
    """Table and expansion."""
    expected = scipy.stats.t.ppf(0.975, num_freedoms)

    assert student_t(num_freedoms) == pytest.approx(expected, rel=3e-3)


def test_rounds_bound_their_mean_as_student_says() -> None:
    """Differences plainly, ratios by their logarithms; one round says nothing."""
    differences, ratios = [0.1, 0.3, 0.2, 0.4], [0.5, 0.7, 0.6]

    plain, logged = by_round(differences, 0.0), by_round(ratios, 1.0)

    expected = scipy.stats.t.interval(0.95, 3, np.mean(differences), scipy.stats.sem(differences))
    assert plain is not None
    assert (plain.low, plain.high) == pytest.approx(expected, rel=1e-3)
    logs = np.log(ratios)
    expected = np.exp(scipy.stats.t.interval(0.95, 2, np.mean(logs), scipy.stats.sem(logs)))
    assert logged is not None
    assert (logged.low, logged.high) == pytest.approx(tuple(expected), rel=1e-3)
    assert by_round([0.5], 1.0) is None
    assert by_round([0.0, 0.5], 1.0) == Interval(low=0.0, high=0.5)
