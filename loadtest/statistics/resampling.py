"""Variants that have units of their own: means and quantiles of each, and how far two are apart.

Units (sessions, slots) are drawn again, variant by variant, as `bootstrap` draws clusters. These
intervals hold for one look; those of `sequence` hold at every look.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.statistics.bootstrap import Floats, Ints, bundled, drawn, middle, student_t
from loadtest.statistics.effects import totals
from loadtest.statistics.sequence import Floats as AnyFloats


class Estimate(Struct, frozen=True, kw_only=True):
    """A value with its 95 % interval; None: nothing was measured, or too little for bounds."""

    value: float | None
    low: float | None = None
    high: float | None = None


UNKNOWN: Final = Estimate(value=None)


class Resampled(Struct, frozen=True, kw_only=True):
    """One arm's value, and those of its resamples, shape (NUM_DRAWS,)."""

    value: float
    values: Floats
    num_units: int

    @property
    def estimate(self) -> Estimate:
        """Return the value and the middle 95 % of the resamples."""
        return _estimate(self.value, self.values, self.num_units)


def resample(sums: Floats, counts: Floats, seed: int) -> Resampled | None:
    """Resample an arm's units; None where nothing was measured.

    Args:
        sums: Weighted numerators per unit, shape (num_units,).
        counts: Weighted denominators; units with 0 are left out.
        seed: Of the resampling.
    """
    measured = counts > 0
    sums, counts = sums[measured], counts[measured]
    num_units = len(sums)
    if not num_units:
        return None
    group, num_groups = bundled(np.arange(num_units), num_units, seed)
    both = np.stack([totals(group, side, num_groups) for side in (sums, counts)], axis=1)

    def means(weights: Floats) -> Floats:
        numerators, denominators = (weights @ both).T
        return np.asarray(numerators / denominators)

    return Resampled(
        value=float(sums.sum() / counts.sum()),
        values=drawn(means, num_groups, seed),
        num_units=num_units,
    )


def difference(
    baseline: Resampled | None, treatment: Resampled | None, *, is_relative: bool
) -> Estimate:
    """Return the ratio less 1 (or the difference) of two arms that were resampled apart."""
    if baseline is None or treatment is None or (is_relative and not baseline.value):
        return UNKNOWN
    num_units = min(baseline.num_units, treatment.num_units)
    if not is_relative:
        value, values = treatment.value - baseline.value, treatment.values - baseline.values
        return _estimate(value, values, num_units)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, values = treatment.value / baseline.value, treatment.values / baseline.values
    return _estimate(value - 1, values - 1, num_units)


def quantile(values: AnyFloats, weights: AnyFloats, unit: Ints, q: float) -> Estimate:
    """Find a quantile of requests, and an interval that knows of their units.

    The share of requests below it is a ratio of sums over units, with a standard error as any;
    the quantiles at the bounds of that share are the interval. Source: Woodruff 1952; for metrics
    of clusters, Deng, Knoblich, Lu 2018. A resample would need all requests each time.
    """
    if not len(values):
        return UNKNOWN
    order = np.argsort(values, kind="stable")
    ordered, cumulated = values[order], np.cumsum(weights[order])
    total = cumulated[-1]

    def at(share: float) -> float:
        index = np.searchsorted(cumulated, share * total, "left")
        return float(ordered[min(int(index), len(ordered) - 1)])

    found = at(q)
    units, of_unit = np.unique(unit, return_inverse=True)
    if len(units) < 2:
        return Estimate(value=found)
    below = values <= found
    share = float(weights[below].sum() / total)
    influence = totals(of_unit, weights * (below - share), len(units)) / total
    se = float(np.sqrt(np.sum(influence**2) * len(units) / (len(units) - 1)))
    reach = student_t(len(units) - 1) * se
    return Estimate(value=found, low=at(max(0.0, q - reach)), high=at(min(1.0, q + reach)))


def _estimate(value: float, values: Floats, num_units: int) -> Estimate:
    values = values[np.isfinite(values)]
    if len(values) < 2 or not np.isfinite(value):
        return Estimate(value=value if np.isfinite(value) else None)
    if not value and not values.any():
        return Estimate(value=value)  # nothing happened; resampling cannot say how seldom it does
    found = middle(values, num_units)
    return Estimate(value=value, low=found.low, high=found.high)
