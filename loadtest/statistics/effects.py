"""The difference between two variants, its standard error, and how well that is known.

What must live here: estimation from the sums of randomised units. What must not: where the sums
come from, and what is concluded.

A unit (a session, a time slot) contributes a sum of outcomes and a count; requests of one unit are
similar, so the unit is what varies independently. A variant's value is the ratio of its sums, the
mean per request, and a unit's influence on it is (sum - mean * count) / all counts. Source:
linearisation of ratios, e.g. Deng, Knoblich, Lu 2018, "Applying the delta method in metric
analytics". Units are weighted by 1 / (their variant's share when they came), so that a variant that
was ramped up late is not compared with the other one's whole day (inverse probability weighting,
normalised: Hajek's estimator). The weights are in the sums.

All arrays have units on the last axis; a study puts its repetitions on the axes before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadtest.statistics.sequence import Floats

Mask = NDArray[np.bool_]

MIN_UNITS = 10
"""Fewer units in an arm (or fewer blocks) decide nothing: an interval's standard error is then
itself a guess. Without it an A/A switchback of balanced pairs, looked at after each, came out
decided in 6.2 % of 2,000 drawn ones, with it in 2.3 % of 4,000, at a promised 5 %."""


class Effect(NamedTuple):
    """Treatment against baseline: `value` is the log of the ratio, or a difference.

    `df` are the degrees of freedom of `se`: few where few units, or a few large ones, make most
    of the variance. All have the shape of the leading axes.
    """

    value: Floats
    se: Floats
    df: Floats
    baseline: Floats  # the arms' values
    treatment: Floats
    variance_kept: Floats  # by the covariate's adjustment; 1.0 without one


def estimate(
    sums: Floats,
    counts: Floats,
    is_treated: Mask,
    *,
    is_relative: bool = True,
    covariate: Floats | None = None,
    block: NDArray[np.int64] | None = None,
) -> Effect:
    """Compare the treated units with the others.

    Args:
        sums: Outcomes summed per unit, shape (..., num_units).
        counts: What they are means over, same shape; units with 0 do not count.
        is_treated: Arm of each unit, same shape (or broadcast to it).
        is_relative: Log of the ratio of the arms' means; else their difference.
        covariate: Sums per unit of something no arm can influence, to take what it explains out
            of the difference. Source: Deng, Xu, Kohavi, Walker 2013 (CUPED), for ratios.
        block: Number of the block of each unit, shape (num_units,), where arms were drawn in
            balanced blocks: then blocks are what is independent, and what they have in common
            (the hour of the day) cancels. Blocks without both arms are left out.

    Returns:
        The effect; NaN where an arm has nothing, `df` 0 below `MIN_UNITS`.
    """
    if block is not None:
        keeps = _complete(counts, is_treated, block)
        sums, counts = sums * keeps, counts * keeps
    with np.errstate(divide="ignore", invalid="ignore"):
        baseline, influence_b = _ratio(sums, counts, ~is_treated, is_relative)
        treatment, influence_t = _ratio(sums, counts, is_treated, is_relative)
        value = np.log(treatment / baseline) if is_relative else treatment - baseline
        influence: Floats = influence_t - influence_b  # each unit is in one of them
        kept: Floats = np.ones_like(value)
        if covariate is not None:
            value, influence, kept = _adjusted(
                value, influence, covariate, counts, is_treated, block
            )
        if block is not None:
            num_least = _num(_by_block(counts, block))
            variance, df = _spread(_by_block(influence, block), num_least)
        else:
            variance, df, num_least = _apart(influence, counts, is_treated)
    is_known = np.isfinite(value) & np.isfinite(variance) & (variance > 0) & np.isfinite(df)
    return Effect(
        value=np.where(is_known, value, np.nan),
        se=np.where(is_known, np.sqrt(np.where(is_known, variance, 1.0)), np.nan),
        df=np.where(is_known & (num_least >= MIN_UNITS), df, 0.0),
        baseline=baseline,
        treatment=treatment,
        variance_kept=kept,
    )


def totals(index: NDArray[np.int64], values: Floats | None, num: int) -> Floats:
    """Sum values (None: count) by index in [0, num); shape (num,)."""
    return np.asarray(np.bincount(index, values, num), dtype=float)


def num_effective(counts: Floats) -> float:
    """Count units as if all were of one size: (sum of sizes)^2 / sum of squares (Kish)."""
    squares = float(np.sum(counts**2))
    total = float(np.sum(counts))
    return total * total / squares if squares else 0.0


def _ratio(sums: Floats, counts: Floats, mask: Mask, is_relative: bool) -> tuple[Floats, Floats]:
    """Compute one arm's mean, and its units' influence on it (0 for others')."""
    sums, counts = sums * mask, counts * mask
    total = counts.sum(-1)
    mean = sums.sum(-1) / total
    influence = (sums - mean[..., None] * counts) / total[..., None]
    return mean, influence / mean[..., None] if is_relative else influence


def _adjusted(
    value: Floats,
    influence: Floats,
    covariate: Floats,
    counts: Floats,
    is_treated: Mask,
    block: NDArray[np.int64] | None,
) -> tuple[Floats, Floats, Floats]:
    """Take out what the covariate explains; also the share of the variance that is left."""
    mean_b, moved_b = _ratio(covariate, counts, ~is_treated, False)
    mean_t, moved_t = _ratio(covariate, counts, is_treated, False)
    moved: Floats = moved_t - moved_b
    one, other = influence, moved
    if block is not None:
        one, other = _by_block(influence, block), _by_block(moved, block)
    slope = np.nan_to_num((one * other).sum(-1) / (other**2).sum(-1), posinf=0.0, neginf=0.0)
    kept = ((one - slope[..., None] * other) ** 2).sum(-1) / (one**2).sum(-1)
    return value - slope * (mean_t - mean_b), influence - slope[..., None] * moved, kept


def _apart(influence: Floats, counts: Floats, is_treated: Mask) -> tuple[Floats, Floats, Floats]:
    """Add the variances of two arms drawn apart; degrees of freedom after Satterthwaite."""
    num_t, num_b = _num(counts * is_treated), _num(counts * ~is_treated)
    var_t, df_t = _spread(influence * is_treated, num_t)
    var_b, df_b = _spread(influence * ~is_treated, num_b)
    variance = var_t + var_b
    df = variance**2 / (var_t**2 / df_t + var_b**2 / df_b)
    return variance, df, np.minimum(num_t, num_b)


def _spread(influence: Floats, num: Floats) -> tuple[Floats, Floats]:
    """Estimate the variance of a sum of influences, and how many degrees of freedom it has.

    A variance from n values of kurtosis k varies like one with 2 n / (k - 1) degrees of freedom:
    n where values are normal, few where a few units dominate. Never more than n - 1.
    """
    squares = influence**2
    second, fourth = squares.sum(-1), (squares**2).sum(-1)
    excess = np.where(second > 0, fourth / second**2 - 1 / num, 0.0)  # (k - 1) / n
    df = np.minimum(num - 1, 2 / np.maximum(excess, 1e-12))
    return second * num / (num - 1), df


def _by_block(values: Floats, block: NDArray[np.int64]) -> Floats:
    """Sum over the units of each block; shape (..., num_blocks)."""
    num_blocks = int(block.max(initial=-1)) + 1
    summed = np.zeros((num_blocks, *values.shape[:-1]))
    np.add.at(summed, block, np.moveaxis(values, -1, 0))
    return np.asarray(np.moveaxis(summed, 0, -1))


def _complete(counts: Floats, is_treated: Mask, block: NDArray[np.int64]) -> Mask:
    """Select the units of blocks in which both arms have something."""
    has_both = (_by_block(counts * is_treated, block) > 0) & (
        _by_block(counts * ~is_treated, block) > 0
    )
    return np.asarray(has_both[..., block])


def _num(counts: Floats) -> Floats:
    return np.asarray(np.count_nonzero(counts, axis=-1), dtype=float)
