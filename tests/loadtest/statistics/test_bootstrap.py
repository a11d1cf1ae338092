"""Intervals that hold the truth as often as they promise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy  # its `stats` is imported by the first test that asks for it

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
    """Known truth 0.8, sessions drawn anew each time: within binomial error of 95 %."""
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
