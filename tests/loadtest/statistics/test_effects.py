"""loadtest.statistics.effects: differences from sums of units, and how well they are known."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.statistics.effects import MIN_UNITS, estimate, num_effective


def units(seed: int = 0, num: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, num).astype(float)
    sums = counts * rng.lognormal(5.0, 0.5, num)
    return sums, counts, rng.random(num) < 0.5


def test_a_ratio_of_means_per_request() -> None:
    """Means are per request, not per session: long sessions weigh by their length."""
    sums, counts, treated = np.array([10.0, 90.0, 40.0, 60.0]), np.array([1.0, 9.0, 8.0, 2.0]), [
        False, False, True, True,
    ]  # fmt: skip

    is_treated = np.array(treated)

    assert estimate(sums, counts, is_treated, is_relative=False).value == 0.0


def test_the_standard_error_is_that_of_repetition() -> None:
    """Over many repetitions, estimates vary as each of them says."""
    found = [estimate(*units(seed)) for seed in range(300)]

    spread = np.std([float(effect.value) for effect in found])

    assert np.mean([float(effect.se) for effect in found]) == pytest.approx(spread, rel=0.12)


def test_few_units_decide_nothing() -> None:
    """Below the least number there are no degrees of freedom, though there is a value."""
    sums, counts, _ = units(num=2 * MIN_UNITS)
    treated = np.arange(2 * MIN_UNITS) < MIN_UNITS - 1

    effect = estimate(sums, counts, treated)

    assert np.isfinite(effect.value)
    assert float(effect.df) == 0.0


def test_one_giant_leaves_few_degrees_of_freedom() -> None:
    """Where one unit makes most of the variance, the variance is hardly known."""
    sums, counts, treated = units()
    plain = estimate(sums, counts, treated)
    sums[0], counts[0] = sums[0] * 500, counts[0] * 200

    giant = estimate(sums, counts, treated)

    assert float(plain.df) > 50
    assert float(giant.df) < 5
    assert num_effective(counts) < 10


def test_pairs_cancel_what_they_have_in_common() -> None:
    """With balanced pairs of slots a wandering level is no noise any more."""
    rng = np.random.default_rng(1)
    level = np.repeat(rng.normal(0, 1.0, 60), 2)
    treated = np.tile([True, False], 60)
    counts = np.full(120, 50.0)
    sums = counts * np.exp(level + rng.normal(0, 0.05, 120) - 0.2 * treated)

    apart = estimate(sums, counts, treated)
    paired = estimate(sums, counts, treated, block=np.arange(120) // 2)

    assert float(paired.se) < 0.3 * float(apart.se)
    assert float(paired.value) == pytest.approx(-0.2, abs=0.1)


def test_incomplete_pairs_are_left_out() -> None:
    """A pair that has one arm only says nothing about the difference."""
    sums, counts, _ = units(num=40)
    treated = np.tile([True, False], 20)
    block = np.arange(40) // 2
    counts[1] = 0.0

    with_half = estimate(sums, counts, treated, block=block)
    without = estimate(sums[2:], counts[2:], treated[2:], block=block[2:] - 1)

    assert float(with_half.value) == pytest.approx(float(without.value))
    assert float(with_half.se) == pytest.approx(float(without.se))


def test_an_arm_without_variance_is_known() -> None:
    """An arm in which nothing ever happened has a rate of 0, and its variance does not spoil."""
    treated = np.arange(100) < 50
    failures = np.where(treated, np.arange(100) % 4 == 0, False).astype(float)

    effect = estimate(failures, np.ones(100), treated, is_relative=False)

    assert float(effect.value) == pytest.approx(0.26)
    assert float(effect.df) > 10
