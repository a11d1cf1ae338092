"""router.replicas.bounded: the best coefficients within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from router.replicas.bounded import solve_within


@pytest.mark.parametrize("seed", range(50))
def test_no_other_coefficients_within_the_bounds_fit_better(seed: int) -> None:
    """Free ones fit best, held ones would only leave their bounds; columns may be all but equal."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-3.0, 4.0, 7)
    rows = rng.exponential(1.0, (40, 7))
    if seed % 2:
        rows[:, 3] = rows[:, 2] * rng.normal(1.0, 1e-6, 40)
    rows *= scales
    matrix = rows.T @ rows + np.diag(1e-4 * scales**2)
    vector = rows.T @ (rows @ (rng.normal(0.3, 1.0, 7) / scales))
    lows, highs = np.zeros(7), np.full(7, np.inf)
    lows[5], highs[5] = 0.1 / scales[5], 0.5 / scales[5]

    found = solve_within(matrix, vector, lows, highs)

    slope = (matrix @ found - vector) / np.abs(matrix).max(axis=1) ** 0.5
    slope /= np.abs(vector / np.abs(matrix).max(axis=1) ** 0.5).max()
    is_low, is_high = found <= lows * (1 + 1e-9), found >= highs * (1 - 1e-9)
    assert ((found >= lows * (1 - 1e-12)) & (found <= highs * (1 + 1e-12))).all()
    assert np.abs(slope[~is_low & ~is_high]).max(initial=0.0) < 1e-6
    assert (slope[is_low] > -1e-6).all()
    assert (slope[is_high] < 1e-6).all()
