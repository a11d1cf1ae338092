"""Drift over the turns of one run, and over the runs of a comparison.

Needs scipy (extra `experiments`), imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Final

import numpy as np
from msgspec import Struct

_SURE: Final = 0.01  # p
_MIN_TURNS: Final = 12
_MIN_RUNS: Final = 4


class Trend(Struct, frozen=True, kw_only=True):
    """A figure's change from beginning to end, as a ratio; `is_sure`: p < 0.01."""

    change: float = 1.0
    is_sure: bool = False


def within(values: Sequence[float]) -> Trend:
    """Compare the medians of a run's first and last third; Kendall's rank test."""
    if len(values) < _MIN_TURNS:
        return Trend()
    from scipy.stats import kendalltau

    third = len(values) // 3
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    if first <= 0 or last <= 0 or min(values) == max(values):
        return Trend()
    tested = kendalltau(range(len(values)), values)
    return Trend(change=last / first, is_sure=bool(tested.pvalue < _SURE))


def across(runs: Sequence[tuple[str, float]]) -> Trend:
    """Fit one common exponential trend to the runs' figures, in the order of the runs.

    Args:
        runs: Variant and figure (> 0) of each run. Every variant has its own level.
    """
    arms = sorted({arm for arm, _ in runs})
    spare = len(runs) - len(arms) - 1
    if len(runs) < _MIN_RUNS or spare < 1:
        return Trend()
    from scipy.stats import t as student

    # Taking out each variant's mean leaves the common slope over a position in [-1/2, 1/2].
    names = np.array([arm for arm, _ in runs])
    position = np.linspace(-0.5, 0.5, len(runs))
    logs = np.array([log(figure) for _, figure in runs])
    for arm in arms:
        position[names == arm] -= position[names == arm].mean()
        logs[names == arm] -= logs[names == arm].mean()
    squares = float((position**2).sum())
    if squares < 1e-9:
        return Trend()
    slope = float((position * logs).sum()) / squares
    error = float(np.sqrt(((logs - slope * position) ** 2).sum() / spare / squares))
    if error < 1e-9:
        return Trend(change=exp(slope), is_sure=abs(slope) > 1e-6)
    p_value = 2 * float(student.sf(abs(slope) / error, spare))
    return Trend(change=exp(slope), is_sure=p_value < _SURE)
