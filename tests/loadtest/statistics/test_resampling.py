"""Intervals that hold at one look, by units."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.statistics.bootstrap import MAX_CLUSTERS
from loadtest.statistics.resampling import difference, quantile, resample


def sessions(seed: int, num: int, level: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, num).astype(float)
    return level * counts * rng.lognormal(0.0, 0.6, num), counts


@pytest.mark.parametrize("num", [300, 3 * MAX_CLUSTERS])
def test_the_interval_holds_the_truth_as_often_as_promised(num: int) -> None:
    """Grouped or not, about 95 % of intervals hold the true mean."""
    truth = np.exp(0.6**2 / 2)
    held = 0
    for seed in range(30):
        made = resample(*sessions(seed, num), seed)
        assert made is not None
        found = made.estimate
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high

    assert 25 <= held <= 30


def test_a_difference_is_relative_or_absolute() -> None:
    """Ratios for times, differences for shares; both with bounds around them."""
    base, other = resample(*sessions(1, 500), 1), resample(*sessions(2, 500, 0.5), 2)

    relative = difference(base, other, is_relative=True)
    absolute = difference(base, other, is_relative=False)

    assert relative.value == pytest.approx(-0.5, abs=0.1)
    assert absolute.value == pytest.approx(-0.6, abs=0.15)
    assert relative.low is not None
    assert relative.high is not None
    assert relative.low < relative.value < relative.high < 0


def test_what_never_happened_has_no_bounds() -> None:
    """No error among 50 requests is no proof of a rate of 0."""
    made = resample(np.zeros(50), np.ones(50), 0)

    assert made is not None
    assert made.estimate.value == 0.0
    assert made.estimate.low is None
    assert resample(np.zeros(3), np.zeros(3), 0) is None
    assert difference(None, made, is_relative=False).value is None


def test_quantiles_know_of_their_units() -> None:
    """Requests that are alike within sessions say less: the interval is wider."""
    rng = np.random.default_rng(5)
    level = rng.lognormal(0, 1.0, 100)
    values = np.repeat(level, 20)
    unit = np.repeat(np.arange(100), 20)
    weights = np.ones(2000)

    clustered = quantile(values, weights, unit, 0.5)
    alone = quantile(rng.permutation(values), weights, np.arange(2000), 0.5)

    assert clustered.value == alone.value
    assert clustered.low is not None
    assert clustered.high is not None
    assert alone.low is not None
    assert alone.high is not None
    assert clustered.high - clustered.low > 2 * (alone.high - alone.low)


def test_quantiles_are_weighted() -> None:
    """A request that stands for nine counts as nine."""
    found = quantile(np.array([1.0, 2.0]), np.array([1.0, 9.0]), np.array([0, 1]), 0.2)

    assert found.value == 2.0
    assert quantile(np.empty(0), np.empty(0), np.empty(0, int), 0.5).value is None
