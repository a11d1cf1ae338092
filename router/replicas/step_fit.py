"""Learn a class's inter-token latency from what its engines report, one reading at a time.

    tbt_ms = base_ms + ms_per_request * running + ms_per_mtoken * tokens / 1e6

`running` requests are decoded in one step, which reads the KV of all their `tokens`. Each reading
is the mean latency between two readings of vllm:inter_token_latency_seconds, at their mean load.
Prompts that are computed in between make steps longer. So replicas of role decode have a fit of
their own. For other replicas the latency includes as many prompts as there were recently.

The method is weighted least squares with forgetting, on relative errors. A negative coefficient is
left out. A small ridge divides the time if load hardly varies.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

_NUM = 3
_FORGETTING = 0.99  # half of the weight lies on the last 69 readings, of all replicas of a class
_NUM_ENOUGH = 8
_RIDGE = 1e-4
_LEAST_MS = 0.1  # below this, errors count absolutely
_MTOKEN = 1e-6


class StepFit:
    """The inter-token latency of one replica class."""

    __slots__ = ("_cross", "_gram", "_num_readings", "_theta")

    def __init__(self) -> None:
        self._gram = np.zeros((_NUM, _NUM))
        self._cross = np.zeros(_NUM)
        self._theta: tuple[float, ...] | None = None
        self._num_readings = 0

    def observe(self, num_running: float, num_tokens: float, tbt_ms: float) -> None:
        """Add one reading to the fit; impossible values are ignored."""
        if not (isfinite(tbt_ms) and tbt_ms > 0.0 and num_running > 0.0):
            return
        row = np.array((1.0, num_running, num_tokens * _MTOKEN))
        weight = 1.0 / max(tbt_ms, _LEAST_MS) ** 2
        self._gram = _FORGETTING * self._gram + weight * np.outer(row, row)
        self._cross = _FORGETTING * self._cross + weight * tbt_ms * row
        self._num_readings += 1
        if self._num_readings >= _NUM_ENOUGH:
            self._theta = self._solve()

    def predict_ms(self, num_running: float, num_tokens: float) -> float | None:
        """Predict the inter-token latency of so many requests; None: too little is known."""
        if self._theta is None:
            return None
        base, per_request, per_mtoken = self._theta
        return base + per_request * num_running + per_mtoken * num_tokens * _MTOKEN

    def _solve(self) -> tuple[float, ...]:
        """Solve the normal equations without negative coefficients."""
        used = list(range(_NUM))
        while used:
            gram = self._gram[np.ix_(used, used)]
            ridge = np.diag(_RIDGE * np.diag(gram) + 1e-12)
            found = np.linalg.solve(gram + ridge, self._cross[used])
            if (found >= 0.0).all():
                break
            del used[int(found.argmin())]
        theta = [0.0] * _NUM
        for position, value in zip(used, found, strict=True):
            theta[position] = float(value)
        return tuple(theta)
