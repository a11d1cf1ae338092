"""Intervals for two variants that ran the same turns: by drawing clusters again, and by rounds.

Percentile intervals are too short for few clusters. Their level is widened: 98 % instead of 95 % at
12 clusters, 95.4 % at 100. Source: Hesterberg, "What Teachers Should Know About the Bootstrap" (The
American Statistician 69, 2015, section 4.3).

The demo needs this module, and its extra has numpy but not scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_DRAWS: Final = 2000
LEVEL: Final = 0.95
_STUDENT: Final = {1: 12.7062, 2: 4.3027, 3: 3.1824}
_LOG_MOST: Final = 20.0  # a ratio of 500 million is as good as infinite
_CHUNK: Final = 2_000_000  # numbers at a time, 16 MB


class Interval(Struct, frozen=True, kw_only=True):
    """Bounds of a figure with 95 % confidence."""

    low: float
    high: float


def ratio_of_means(
    ours: Floats, theirs: Floats, cluster: Ints, num_clusters: int, *, seed: int
) -> Interval:
    """Bound `mean(ours) / mean(theirs)` of paired values, shape (num_pairs,) each.

    Args:
        cluster: Of each pair, in [0, num_clusters); num_clusters >= 1.
    """
    sums = [np.bincount(cluster, weights=side, minlength=num_clusters) for side in (ours, theirs)]

    def ratios(weights: Floats) -> Floats:
        mine, other = (weights @ side for side in sums)
        return np.asarray(mine / np.maximum(other, 1e-300))

    return _interval(ratios, num_clusters, num_clusters, seed)


def difference_of_percentiles(
    ours: Floats, theirs: Floats, cluster: Ints, num_clusters: int, share: float, *, seed: int
) -> Interval:
    """Bound `percentile(ours) - percentile(theirs)`, by nearest rank; arguments as above."""
    orders = [np.argsort(side, kind="stable") for side in (ours, theirs)]

    def picked(side: Floats, order: Ints, weights: Floats) -> Floats:
        """Return each draw's percentile: a value counts as often as its cluster was drawn."""
        ranks = np.cumsum(weights[:, cluster[order]], axis=1)
        at = (ranks <= np.floor(share * ranks[:, -1:])).sum(axis=1)
        return np.asarray(side[order][np.minimum(at, len(side) - 1)])

    def differences(weights: Floats) -> Floats:
        return picked(ours, orders[0], weights) - picked(theirs, orders[1], weights)

    return _interval(differences, num_clusters, max(num_clusters, len(ours)), seed)


def percentile(values: Floats, share: float) -> float:
    """Return the nearest-rank percentile, as `loadtest.results.summarize` does."""
    ordered = np.sort(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def by_round(effects: Sequence[float], neutral: float) -> Interval | None:
    """Bound the mean effect of rounds by how far they differ; None: fewer than two rounds.

    A round repeats everything, so noise that all turns of a run share appears only between rounds.
    The interval is Student's, on the logarithm for ratios (`neutral` 1), plain for differences
    (`neutral` 0). With two rounds it is wide: 12.7 standard errors.
    """
    if len(effects) < 2:
        return None
    is_ratio = neutral == 1.0
    if is_ratio and min(effects) <= 0:
        return Interval(low=0.0, high=max(effects))
    values = np.log(effects) if is_ratio else np.asarray(effects)
    reach = student_t(len(values) - 1) * float(values.std(ddof=1)) / sqrt(len(values))
    middle = float(values.mean())
    if not is_ratio:
        return Interval(low=middle - reach, high=middle + reach)
    low, high = np.exp(np.clip((middle - reach, middle + reach), -_LOG_MOST, _LOG_MOST))
    return Interval(low=float(low), high=float(high))


def student_t(num_freedoms: int) -> float:
    """Return Student's two-sided 95 % quantile without scipy.

    From 4 degrees of freedom on Abramowitz and Stegun 26.7.5, within 0.3 %; below, their table.
    """
    if num_freedoms < 4:
        return _STUDENT[max(1, num_freedoms)]
    n, z = num_freedoms, NormalDist().inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)


def _interval(
    statistic: Callable[[Floats], Floats], num_clusters: int, num_columns: int, seed: int
) -> Interval:
    """Return the middle 95 % of `NUM_DRAWS` draws, widened for few clusters.

    Args:
        statistic: Of weights, shape (num_draws, num_clusters): how often each cluster was drawn.
        num_columns: Numbers that the statistic needs for each draw.
    """
    random = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // num_columns)
    found = []
    for begin in range(0, NUM_DRAWS, at_once):
        size = min(at_once, NUM_DRAWS - begin)
        chosen = random.integers(num_clusters, size=(size, num_clusters))
        chosen += np.arange(size)[:, None] * num_clusters
        counts = np.bincount(chosen.ravel(), minlength=size * num_clusters)
        found.append(statistic(counts.reshape(size, num_clusters).astype(np.float64)))
    n = max(2, num_clusters)
    outside = NormalDist().cdf(-sqrt(n / (n - 1)) * student_t(n - 1))
    low, high = np.quantile(np.concatenate(found), (outside, 1 - outside))
    return Interval(low=float(low), high=float(high))
