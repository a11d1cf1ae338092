"""Confidence sequences: intervals that hold at every look, however often and whenever one looks.

What must live here: the formulas, for numbers and arrays alike. What must not: what was measured.

A 95 % interval that is drawn again after every batch misses the truth, sooner or later, far more
often than in 5 % of experiments. A confidence sequence misses it *ever* in 5 %, so looking,
stopping early and going on are all allowed. The price is width: about 1.5 times the usual
interval where it is tuned best, and slowly more elsewhere.

Method: an estimate with standard error `se` carries information 1 / se^2. Its likelihood ratio
against "the effect is x", averaged over effects around x from N(0, scale^2), is a martingale that
starts at 1 and reaches 1 / alpha with a probability of at most alpha (Ville); the x for which it
has not make the interval. With tau = scale^2 / se^2:

    radius = se * sqrt((1 + 1 / tau) * (log(1 + tau) + 2 * log(1 / alpha)))

Source: Robbins 1970; Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", two-sided normal mixture; for estimated variances and without
a distribution assumed, Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2024, "Time-uniform central
limit theory and asymptotic confidence sequences" (arXiv 2103.06476), Theorem 2.2.

With few units the variance itself is poorly known. Then the likelihood ratio of the t statistic
with `df` degrees of freedom is averaged instead: Lindon, Ham, Tingley, Bojinov 2022,
"Anytime-Valid Linear Models and Regression Adjusted Causal Inference in Randomized Experiments"
(arXiv 2210.08589):

    1 / sqrt(1 + tau) * ((1 + t^2 / df) / (1 + t^2 / ((1 + tau) * df))) ^ ((df + 1) / 2)

which tends to the normal mixture as df grows, and whose interval is infinite while df is too
small to say anything at level alpha.

Assumed: units are assigned independently (or in independent blocks), none dominates the sums, and
there are enough of them for a central limit theorem; `scale` was chosen before looking.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]


def radius(se: ArrayLike, *, scale: float, alpha: float = 0.05, df: ArrayLike = np.inf) -> Floats:
    """Compute half the width of the interval; any shape.

    Args:
        se: Standard error of the estimate, > 0; NaN or infinite where nothing is known yet.
        scale: Effects of about this size are looked for, in units of the estimate; the interval
            is narrowest, against its standard error, where such effects come to be decided.
        alpha: Probability that the sequence ever misses.
        df: Degrees of freedom of `se`.

    Returns:
        The radius; infinite where `df` is too small, or `se` unknown.
    """
    se, df = np.asarray(se, dtype=float), np.asarray(df, dtype=float)
    is_known = np.isfinite(se) & (se > 0) & (df > 0)
    se_known = np.where(is_known, se, 1.0)
    tau = (scale / se_known) ** 2
    log_bound = np.log1p(tau) + 2 * np.log(1 / alpha)
    normal = (1 + 1 / tau) * log_bound
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        finite_df = np.where(is_known & np.isfinite(df), df, 1.0)
        ratio = np.exp(log_bound / (finite_df + 1))
        room = 1 - ratio / (1 + tau)
        student = np.where(room > 0, finite_df * (ratio - 1) / room, np.inf)
        squared = np.where(np.isfinite(df), student, normal)
        return np.where(is_known, se_known * np.sqrt(squared), np.inf)


def log_evidence(estimate: ArrayLike, se: ArrayLike, *, scale: float, df: float = np.inf) -> Floats:
    """Compute the logarithm of the mixture likelihood ratio against "no effect".

    It is above log(1 / alpha) exactly where the interval of `radius` excludes 0;
    min(1, exp(-it)) is a p-value that holds at every look.
    """
    estimate, se = np.asarray(estimate, dtype=float), np.asarray(se, dtype=float)
    tau = (scale / se) ** 2
    squared = (estimate / se) ** 2
    if np.isinf(df):
        return np.asarray(0.5 * (squared * tau / (1 + tau) - np.log1p(tau)))
    gain = np.log1p(squared / df) - np.log1p(squared / ((1 + tau) * df))
    return np.asarray(0.5 * ((df + 1) * gain - np.log1p(tau)))
