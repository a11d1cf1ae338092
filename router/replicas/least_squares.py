"""Least squares with bounds on each coefficient."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NUM_BLOCK_STEPS: Final = 8
_NUM_STEPS: Final = 100


def solve_within(matrix: Array, vector: Array, lows: Array, highs: Array) -> Array:
    """Solve `matrix @ x = vector` for lows <= x <= highs in the least-squares sense.

    The matrix is positive definite (the prior's pull is on its diagonal). Entries beyond a bound
    are fixed there and the rest is solved again; entries that fit better off their bound are freed.
    This is exact after two or three solutions. If it cycles, one entry is changed at a time.
    Source: Judice and Pires 1992, block principal pivoting.
    """
    scale = 1.0 / np.sqrt(np.diag(matrix))
    matrix, vector = matrix * np.outer(scale, scale), vector * scale
    lows, highs = lows / scale, highs / scale
    x = np.linalg.solve(matrix, vector)
    held = np.full(len(x), np.nan)  # the bound at which an entry is fixed; nan: none
    for step in range(_NUM_STEPS):
        free = np.isnan(held)
        slope = matrix @ x - vector  # below 0: a larger value would fit better
        leaves = ((held == lows) & (slope < 0.0)) | ((held == highs) & (slope > 0.0))
        wrong = np.flatnonzero(np.where(free, (x < lows) | (x > highs), leaves))
        if not len(wrong):
            break
        if step >= _NUM_BLOCK_STEPS:
            wrong = wrong[-1:]
        bound = np.where(x < lows, lows, highs)
        held[wrong] = np.where(free, bound, np.nan)[wrong]
        free = np.isnan(held)
        x = np.where(free, 0.0, held)
        x[free] = np.linalg.solve(matrix[free][:, free], (vector - matrix @ x)[free])
    return scale * np.clip(x, lows, highs)
