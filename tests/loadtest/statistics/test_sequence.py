"""loadtest.statistics.sequence: intervals that hold at every look."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.statistics.sequence import radius

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
