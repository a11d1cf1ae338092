"""loadtest.statistics.effects: differences from sums of units, and how well they are known.

loadtest.statistics.sequence: intervals that hold at every look.

loadtest.statistics.power: what is still needed, and whether that is enough.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.statistics.effects import MIN_UNITS, estimate, num_effective
from loadtest.statistics.power import Needs, needs
from loadtest.statistics.sequence import radius


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


SE = st.floats(1e-4, 2.0)
SCALE = st.floats(0.01, 1.0)
ALPHA = st.floats(1e-4, 0.3)


def log_evidence(estimate: float, se: float, *, scale: float, df: float) -> float:
    """Return the logarithm of the mixture likelihood ratio against "no effect", as published."""
    tau, squared = (scale / se) ** 2, (estimate / se) ** 2
    gain = np.log1p(squared / df) - np.log1p(squared / ((1 + tau) * df))
    return 0.5 * ((df + 1) * gain - np.log1p(tau))


@given(SE, SCALE, ALPHA, st.floats(3.0, 1e4))
def test_the_interval_is_what_the_evidence_does_not_exclude(
    se: float, scale: float, alpha: float, df: float
) -> None:
    """At the radius the mixture likelihood ratio is exactly 1 / alpha."""
    reach = float(radius(se, scale=scale, alpha=alpha, df=df))

    if np.isfinite(reach):
        evidence = float(log_evidence(reach, se, scale=scale, df=df))
        assert evidence == pytest.approx(np.log(1 / alpha), rel=1e-6, abs=1e-6)
    else:
        assert log_evidence(1e6 * se, se, scale=scale, df=df) <= np.log(1 / alpha)


def test_the_published_formula() -> None:
    """Theorem 2.2 of Waudby-Smith et al.: n normal observations, mixture variance rho^2."""
    num, rho, sigma, alpha = 500, 0.1, 2.0, 0.05
    published = sigma * np.sqrt(
        2 * (num * rho**2 + 1) / (num**2 * rho**2) * np.log(np.sqrt(num * rho**2 + 1) / alpha)
    )

    ours = radius(sigma / np.sqrt(num), scale=rho * sigma, alpha=alpha, df=1e9)

    assert float(ours) == pytest.approx(published, rel=1e-4)


@given(SE, SCALE)
def test_it_is_wider_than_a_look_and_few_degrees_of_freedom_widen_it(
    se: float, scale: float
) -> None:
    """Looking always costs width; so does not knowing the variance."""
    reaches = [float(radius(se, scale=scale, alpha=0.05, df=df)) for df in (1e9, 1000.0, 30.0, 8.0)]

    assert reaches[0] > 1.96 * se
    assert reaches == sorted(reaches)


def test_nothing_known_is_infinite() -> None:
    """Without a standard error, or with too few degrees of freedom, nothing is excluded."""
    for se, df in ((np.nan, 9), (np.inf, 9), (0.0, 9), (0.1, 0), (0.1, 1.0)):
        assert radius(se, scale=0.2, alpha=0.05, df=df) == np.inf


def test_a_walk_without_drift_seldom_leaves_it_ever() -> None:
    """Of 2,000 normal walks, looked at 500 times each, at most about alpha ever leave the band."""
    rng = np.random.default_rng(3)
    walks = np.cumsum(rng.normal(size=(2000, 500)), axis=1)
    num = np.arange(1, 501)
    reach = np.array([radius(1 / np.sqrt(n), scale=0.2, alpha=0.1, df=1e9) for n in num])

    ever = np.any(np.abs(walks / num) > reach, axis=1).mean()

    assert 0.02 < ever < 0.1 + 3 * np.sqrt(0.1 * 0.9 / 2000)


def needed(se: float | None = 0.05, effect: float = 0.1, **changes: float) -> Needs:
    given = {"df": 500.0, "num_units": 1000, "span_s": 3600.0, **changes}
    return needs(
        se=se,
        alpha=0.05,
        scale=0.2,
        effect=effect,
        margin=0.05,
        **given,  # type: ignore[arg-type]
    )


def test_half_the_effect_needs_four_times_the_units() -> None:
    """As for every standard error, a little more for the looking."""
    large, small = needed(effect=0.2).to_find, needed(effect=0.1).to_find

    assert large is not None
    assert small is not None
    assert small.num_units / large.num_units == pytest.approx(4, rel=0.12)


def test_hours_follow_the_traffic() -> None:
    """Three times as many units take twice as long again."""
    found = needed().to_find

    assert found is not None
    assert found.more_s == pytest.approx(3600 * found.num_more_units / 1000)
    still = needed(span_s=0.0).to_find
    assert still is not None
    assert still.more_s is None


def test_what_is_needed_is_unknown_where_nothing_is_known() -> None:
    """Without a variance, or for practically nothing to find, there is no number."""
    assert needed(se=None) == Needs(to_find=None, to_equal=None)
    assert needed(effect=1e-6).to_find is None
