"""Intervals that hold at one look, by resampling units: what the tables of a report show.

The verdict does not use them; it uses `sequence.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.observations import Bools, Ints
from loadtest.extras import need
from loadtest.statistics.effects import totals
from loadtest.statistics.sequence import Floats

NUM_RESAMPLES: Final = 1000
MAX_GROUPS: Final = 500
"""More units are dealt into so many groups, and groups are resampled: sums of independent units
are independent, and resamples stay small."""


class Interval(Struct, frozen=True, kw_only=True):
    """A value with its 95 % interval; None: nothing was measured, or too little for bounds."""

    value: float | None
    low: float | None = None
    high: float | None = None


NOTHING: Final = Interval(value=None)


class Resampled(Struct, frozen=True, kw_only=True):
    """One arm's value, and those of its resamples, shape (NUM_RESAMPLES,)."""

    value: float
    values: Floats

    @property
    def interval(self) -> Interval:
        """Take the middle 95 % of the resamples."""
        return _middle(self.value, self.values)


def resample(sums: Floats, counts: Floats, seed: int) -> Resampled | None:
    """Resample an arm's units; None where nothing was measured.

    Args:
        sums: Weighted numerators per unit, shape (num_units,).
        counts: Weighted denominators; units with 0 are left out.
        seed: Of the resampling.
    """
    measured = counts > 0
    sums, counts = sums[measured], counts[measured]
    if not len(sums):
        return None
    rng = np.random.default_rng(seed)
    if len(sums) > MAX_GROUPS:
        group = rng.permutation(len(sums)) % MAX_GROUPS
        value = float(sums.sum() / counts.sum())
        sums, counts = (totals(group, values, MAX_GROUPS) for values in (sums, counts))
    else:
        value = float(sums.sum() / counts.sum())
    drawn = rng.integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    return Resampled(value=value, values=sums[drawn].sum(1) / counts[drawn].sum(1))


def compare(
    baseline: Resampled | None, treatment: Resampled | None, *, is_relative: bool
) -> Interval:
    """Take the ratio less 1 (or the difference) of two arms that were resampled apart."""
    if baseline is None or treatment is None or (is_relative and not baseline.value):
        return NOTHING
    if not is_relative:
        return _middle(treatment.value - baseline.value, treatment.values - baseline.values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _middle(treatment.value / baseline.value - 1, treatment.values / baseline.values - 1)


def quantile(values: Floats, weights: Floats, unit: Ints, q: float) -> Interval:
    """Find a quantile of requests, and an interval that knows of their units.

    The share of requests below it is a ratio of sums over units, with a standard error as any;
    the quantiles at the bounds of that share are the interval. Source: Woodruff 1952; for metrics
    of clusters, Deng, Knoblich, Lu 2018. A resample would need all requests each time.
    """
    if not len(values):
        return NOTHING
    order = np.argsort(values, kind="stable")
    ordered, cumulated = values[order], np.cumsum(weights[order])
    total = cumulated[-1]

    def at(share: float) -> float:
        index = np.searchsorted(cumulated, share * total, "left")
        return float(ordered[min(int(index), len(ordered) - 1)])

    found = at(q)
    units, of_unit = np.unique(unit, return_inverse=True)
    if len(units) < 2:
        return Interval(value=found)
    below: Bools = values <= found
    share = float(weights[below].sum() / total)
    influence = totals(of_unit, weights * (below - share), len(units)) / total
    se = float(np.sqrt(np.sum(influence**2) * len(units) / (len(units) - 1)))
    reach = float(need("scipy.stats").t.ppf(0.975, len(units) - 1)) * se
    return Interval(value=found, low=at(max(0.0, q - reach)), high=at(min(1.0, q + reach)))


def _middle(value: float, values: Floats) -> Interval:
    values = values[np.isfinite(values)]
    if len(values) < 2 or not np.isfinite(value):
        return Interval(value=value if np.isfinite(value) else None)
    if not value and not values.any():
        return Interval(value=value)  # nothing happened; resampling cannot say how seldom it does
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(value=value, low=float(low), high=float(high))
