"""Intervals: by drawing whole clusters anew (bootstrap, percentile method), and by rounds.

Percentile intervals are too short for few clusters: like a normal quantile in the place of
Student's, and a standard deviation divided by n. Their levels are therefore widened as in
Hesterberg, "What Teachers Should Know About the Bootstrap" (The American Statistician 69, 2015,
section 4.3): to the normal level of sqrt(n / (n - 1)) t(n - 1). At 12 clusters that is 98 % for
95 %, at 100 it is 95.4 %.
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
_LOG_MOST: Final = 20.0  # a ratio of half a milliard is as good as infinite
MAX_CLUSTERS: Final = 500  # more are bundled: a sum of independent ones is as good a cluster
_CHUNK: Final = 1_000_000  # weights at a time, 8 MB


class Interval(Struct, frozen=True, kw_only=True):
    """Where a figure lies with 95 % confidence, as far as the draw of clusters decides."""

    low: float
    high: float


def ratio_of_means(
    ours: Floats, theirs: Floats, cluster: Ints, num_clusters: int, *, seed: int
) -> Interval:
    """Bound `mean(ours) / mean(theirs)` of paired values, shape (num_pairs,) each.

    Args:
        cluster: Of each pair, in [0, num_clusters); num_clusters >= 1.
    """
    cluster, num_clusters = bundled(cluster, num_clusters, seed)
    sums = np.stack(
        [np.bincount(cluster, weights=side, minlength=num_clusters) for side in (ours, theirs)],
        axis=1,
    )

    def ratios(weights: Floats) -> Floats:
        totals = weights @ sums
        return np.asarray(totals[:, 0] / np.maximum(totals[:, 1], 1e-300))

    return _interval(ratios, num_clusters, seed)


def difference_of_percentiles(
    ours: Floats, theirs: Floats, cluster: Ints, num_clusters: int, share: float, *, seed: int
) -> Interval:
    """Bound `percentile(ours) - percentile(theirs)`, by nearest rank; arguments as above."""
    cluster, num_clusters = bundled(cluster, num_clusters, seed)
    sizes = np.bincount(cluster, minlength=num_clusters).astype(np.float64)
    sides = [_Ranks(side, cluster, num_clusters, share) for side in (ours, theirs)]

    def differences(weights: Floats) -> Floats:
        wanted = np.floor(share * (weights @ sizes))
        mine, other = (side.pick(weights, wanted) for side in sides)
        return mine - other

    return _interval(differences, num_clusters, seed)


def drawn(statistic: Callable[[Floats], Floats], num_clusters: int, seed: int) -> Floats:
    """Draw clusters anew `NUM_DRAWS` times and return the statistic of each draw.

    Args:
        statistic: Of weights, shape (num_draws, num_clusters): how often each cluster was drawn.
    """
    random = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // num_clusters)
    found: list[Floats] = []
    for begin in range(0, NUM_DRAWS, at_once):
        size = min(at_once, NUM_DRAWS - begin)
        chosen = random.integers(num_clusters, size=(size, num_clusters))
        chosen += np.arange(size)[:, None] * num_clusters
        counts = np.bincount(chosen.ravel(), minlength=size * num_clusters)
        found.append(statistic(counts.reshape(size, num_clusters).astype(np.float64)))
    return np.concatenate(found)


def middle(values: Floats, num_clusters: int) -> Interval:
    """Return the middle 95 % of draws, widened for few clusters: see the module's charter."""
    outside = _outside(num_clusters)
    low, high = np.quantile(values, (outside, 1 - outside))
    return Interval(low=float(low), high=float(high))


def bundled(cluster: Ints, num_clusters: int, seed: int) -> tuple[Ints, int]:
    """Number clusters anew so that there are at most `MAX_CLUSTERS`; return how many there are."""
    if num_clusters <= MAX_CLUSTERS:
        return cluster, num_clusters
    shuffled = np.random.default_rng(seed).permutation(num_clusters)
    return shuffled[cluster] % MAX_CLUSTERS, MAX_CLUSTERS


def percentile(values: Floats, share: float) -> float:
    """Pick the nearest-rank percentile, as `loadtest.results.summarize` does."""
    ordered = np.sort(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def by_round(effects: Sequence[float], neutral: float) -> Interval | None:
    """Bound the mean effect of rounds by how far they differ; None: fewer than two say nothing.

    Rounds are what was repeated as a whole, so noise that all turns of a run share shows between
    them only. Student's interval of independent, normal effects: on the logarithm for ratios
    (`neutral` 1), plain for differences (`neutral` 0). With two rounds it is wide (12.7 standard
    errors), and rightly so.
    """
    if len(effects) < 2:
        return None
    is_ratio = neutral == 1.0
    if is_ratio and min(effects) <= 0:
        return Interval(low=0.0, high=max(effects))
    values = np.log(effects) if is_ratio else np.asarray(effects)
    error = float(values.std(ddof=1)) / sqrt(len(values))
    reach = student_t(len(values) - 1) * error
    middle = float(values.mean())
    if not is_ratio:
        return Interval(low=middle - reach, high=middle + reach)
    low, high = np.exp(np.clip((middle - reach, middle + reach), -_LOG_MOST, _LOG_MOST))
    return Interval(low=float(low), high=float(high))


def student_t(num_freedoms: int) -> float:
    """Return Student's two-sided 95 % quantile without scipy, which is an extra.

    From 4 degrees of freedom on Abramowitz and Stegun 26.7.5, within 0.3 %; below, their table.
    """
    if num_freedoms < 4:
        return _STUDENT[max(1, num_freedoms)]
    n, z = num_freedoms, NormalDist().inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)


class _Ranks:
    """Percentiles of values that count as often as their cluster was drawn.

    A draw's percentile is looked for among some order statistics: all of them near the plain
    percentile, fewer and fewer away from it. `below` has how many values of each cluster are at
    most that large, so a matrix product has every draw's ranks at once, however many values
    there are.
    """

    __slots__ = ("_below", "_values")

    def __init__(self, side: Floats, cluster: Ints, num_clusters: int, share: float) -> None:
        order = np.argsort(side, kind="stable")
        kept = _near(int(share * len(side)), len(side))
        bounds = np.searchsorted(kept, np.arange(len(side)))  # first kept one at or after each
        inside = np.zeros((num_clusters, len(kept)))
        np.add.at(inside, (cluster[order], bounds), 1.0)
        self._values = side[order][kept]
        self._below = np.cumsum(inside, axis=1)

    def pick(self, weights: Floats, wanted: Floats) -> Floats:
        """Pick for each draw, shape (num_draws,), the first value with a rank above `wanted`."""
        at = (weights @ self._below <= wanted[:, None]).sum(axis=1)
        return np.asarray(self._values[np.minimum(at, len(self._values) - 1)])


def _near(rank: int, size: int) -> Ints:
    """Choose up to some 400 of `size` ranks, the last one among them, dense around `rank`."""
    steps = np.concatenate([np.arange(64), 64 * 1.06 ** np.arange(140)]).round()
    kept = np.concatenate([rank - steps, rank + steps, [size - 1]])
    return np.unique(kept[(kept >= 0) & (kept < size)]).astype(np.int64)


def _interval(statistic: Callable[[Floats], Floats], num_clusters: int, seed: int) -> Interval:
    return middle(drawn(statistic, num_clusters, seed), num_clusters)


def _outside(num_clusters: int) -> float:
    """Return the share to leave out at each end."""
    n = max(2, num_clusters)
    return NormalDist().cdf(-sqrt(n / (n - 1)) * student_t(n - 1))
