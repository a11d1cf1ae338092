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

    The matrix is positive definite (the prior's pull is on its diagonal). What goes beyond a bound
    is held there and the rest solved anew, and what would rather leave its bound is let go: exact
    after two or three solutions. Where that goes round in circles it ends by changing one entry at
    a time. Source: Judice and Pires 1992, block principal pivoting.
    """
    scale = 1.0 / np.sqrt(np.diag(matrix))
    matrix, vector = matrix * np.outer(scale, scale), vector * scale
    lows, highs = lows / scale, highs / scale
    x = np.linalg.solve(matrix, vector)
    held = np.full(len(x), np.nan)  # at which bound; nan: at none
    for step in range(_NUM_STEPS):
        free = np.isnan(held)
        slope = matrix @ x - vector  # below 0: more of it would fit better
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
