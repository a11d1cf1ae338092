"""Learn a class's cost model from first-token times, one observation at a time.

    ttft = base_ms + ms_per_token * tokens + ms_per_mtoken2 * mtoken2
         + ms_per_running * running + ms_per_fetched_token * fetched

`tokens` and `mtoken2` (token-context pairs / 1e6) are the uncached work in front of the first
token: the request's own and all of the queue ahead. So queue and own prefill have one unit from
the first request on, and a wrong scale of the prior changes no order.

How: weighted least squares over a window of the last observations, newest first in weight,
solved again every few observations (5 unknowns, 128 rows: cheaper in the mean than a recursive
update, and past observations are judged again by the current model). Four guards:

1. Relative errors count, not absolute ones: a row weighs 1 / fitted**2. A first token takes
   20 ms or 20 s, and the small ones must be right too.
2. Far-off rows lose weight by the logarithm of observed / fitted (Cauchy), which treats ten times
   too slow (a hiccup) and ten times too fast (the cache held more than was known) alike. One
   row in twenty of either kind moves the fit by a few percent.
3. The prior's proportions never fade: scaled to the median observation, it draws each
   coefficient with the strength of a guess good to a factor of ten. Where all requests are alike
   (collinear columns) it divides the time among the coefficients; nothing winds up. How fast an
   engine is must be learned in every case, so the prior does not constrain it.
4. No coefficient is negative (coordinate descent on the normal equations).
"""

from __future__ import annotations

from math import isfinite

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from policies.view import CostModel

PRIOR = CostModel()

_NUM = 5
_WINDOW = 128
_FORGETTING = 0.98  # half of the weight lies on the last 35 observations
_FLOOR_MS = 5.0  # below this, errors count absolutely: no timer is better
_PRIOR_STRENGTH = 4e-4  # (0.2 / 10)**2: noise of 20 %, prior good to a factor of 10
_RUNNING_SCALE_MS = 1.0  # the prior of ms_per_running is 0, its spread must not be
_CLIP = 3.0  # in units of the median log error; half of the weight is lost there
_MIN_SPREAD = 0.05
_ERROR_DECAY = 0.95
_SOLVE_EVERY = 8
_NUM_REWEIGHTS = 8  # from the prior; later fits start where the last one ended
_NUM_REWEIGHTS_WARM = 2
_NUM_SWEEPS = 60
_PACE_S = 0.05  # between observations of other routers, once the window is full

Array = NDArray[np.float64]


class Work(Struct, frozen=True, kw_only=True, gc=False):
    """All that lies in front of one first token at dispatch: the features of an observation."""

    num_tokens: float  # uncached: queue ahead (what is left of it) and own
    num_mtoken2: float  # (token, context) pairs of these, in millions
    num_running: int  # requests that decode already
    num_fetched_tokens: int  # own tokens read from the cpu tier or the pool

    def predict_ms(self, model: CostModel) -> float:
        """Predict the first-token time of this work."""
        return (
            model.base_ms
            + model.ms_per_token * self.num_tokens
            + model.ms_per_mtoken2 * self.num_mtoken2
            + model.ms_per_running * self.num_running
            + model.ms_per_fetched_token * self.num_fetched_tokens
        )


def mtoken2(num_uncached_tokens: int, num_cached_tokens: int) -> float:
    """Count the (token, context) pairs of one prefill, in millions; see `CostModel`."""
    u = num_uncached_tokens
    return u * (num_cached_tokens + 0.5 * u) * 1e-6


class CostFit:
    """The cost model of one replica class as it is learned.

    `model` is what to predict with: the prior until `trusted_after` observations are in.
    """

    __slots__ = (
        "_error_ms",
        "_next_elsewhere_s",
        "_prior",
        "_pull",
        "_rows",
        "_theta",
        "_trusted_after",
        "_ttft_ms",
        "model",
        "num_observations",
    )

    def __init__(self, prior: CostModel = PRIOR, *, trusted_after: int = 16) -> None:
        self._prior = _coefficients(prior)
        spreads = np.where(self._prior > 0.0, self._prior, _RUNNING_SCALE_MS)
        self._pull = _PRIOR_STRENGTH / spreads**2
        self._trusted_after = trusted_after
        self._theta = self._prior
        self.model = prior
        self._rows = np.zeros((_WINDOW, _NUM))
        self._ttft_ms = np.zeros(_WINDOW)
        self.num_observations = 0
        self._error_ms: float | None = None
        self._next_elsewhere_s = 0.0

    def observe(self, work: Work, ttft_ms: float, predicted_ms: float) -> None:
        """Learn from one first token; `predicted_ms` was predicted at dispatch.

        Values that no first token can have (not finite, not positive) are ignored.
        """
        if not (isfinite(ttft_ms) and ttft_ms > 0.0):
            return
        self._note_error(abs(predicted_ms - ttft_ms))
        slot = self.num_observations % _WINDOW
        self._rows[slot] = (
            1.0,
            work.num_tokens,
            work.num_mtoken2,
            work.num_running,
            work.num_fetched_tokens,
        )
        self._ttft_ms[slot] = ttft_ms
        self.num_observations += 1
        since_trusted = self.num_observations - self._trusted_after
        if since_trusted >= 0 and since_trusted % _SOLVE_EVERY == 0:
            self._theta = self._solved()
            self.model = self._as_model()

    def observe_elsewhere(
        self, work: Work, ttft_ms: float, predicted_ms: float, now_s: float
    ) -> None:
        """Learn from a first token that another router saw; of many, 20 a second.

        Every router receives a note of every request: without a bound each would solve at the pace
        of all together (0.3 to 1 ms for eight observations).
        """
        if self.num_observations < _WINDOW or now_s >= self._next_elsewhere_s:
            self._next_elsewhere_s = now_s + _PACE_S
            self.observe(work, ttft_ms, predicted_ms)

    def _note_error(self, error_ms: float) -> None:
        if self._error_ms is None:
            self._error_ms = error_ms
        else:
            self._error_ms = _ERROR_DECAY * self._error_ms + (1 - _ERROR_DECAY) * error_ms

    def _solved(self) -> Array:
        """Fit the window, weights and coefficients in turn."""
        num = min(self.num_observations, _WINDOW)
        rows, ttft_ms = self._rows[:num], self._ttft_ms[:num]
        ages = (self.num_observations - 1 - np.arange(num)) % _WINDOW
        recency = _FORGETTING**ages
        observed = np.maximum(ttft_ms, _FLOOR_MS)
        ratios = observed / np.maximum(rows @ self._prior, 1e-9)
        speed = float(np.partition(ratios, num // 2)[num // 2])
        prior, pull = speed * self._prior, self._pull / speed**2
        theta = self._theta
        warm = num > _WINDOW // 2
        for step in range(_NUM_REWEIGHTS_WARM if warm else _NUM_REWEIGHTS):
            fitted = np.maximum(rows @ theta, _FLOOR_MS)
            scale = fitted if warm or step else np.sqrt(observed * fitted)
            errors = np.abs(np.log(observed / fitted))
            limit = _CLIP * max(float(np.partition(errors, num // 2)[num // 2]), _MIN_SPREAD)
            trust = 1.0 / (1.0 + (errors / limit) ** 2)
            weighted = rows * (recency * trust / scale**2)[:, None]
            matrix = weighted.T @ rows + np.diag(pull)
            vector = weighted.T @ ttft_ms + pull * prior
            theta = _non_negative(matrix, vector)
        return theta

    def _as_model(self) -> CostModel:
        base, token, token2, running, fetched = self._theta.tolist()
        return CostModel(
            base_ms=base,
            ms_per_token=token,
            ms_per_mtoken2=token2,
            ms_per_running=running,
            ms_per_fetched_token=fetched,
            error_ms=self._error_ms or 0.0,
        )


def _coefficients(model: CostModel) -> Array:
    return np.array(
        [
            model.base_ms,
            model.ms_per_token,
            model.ms_per_mtoken2,
            model.ms_per_running,
            model.ms_per_fetched_token,
        ]
    )


def _non_negative(matrix: Array, vector: Array) -> Array:
    """Solve `matrix @ x = vector` for x >= 0 in the least-squares sense.

    The matrix is positive definite (the prior's pull is on its diagonal). The plain solution is
    right nearly always; coordinate descent takes over where it has a negative entry.
    """
    scale = 1.0 / np.sqrt(np.diag(matrix))
    plain = scale * np.linalg.solve(matrix * np.outer(scale, scale), vector * scale)
    if np.all(plain >= 0.0):
        return plain
    a, b = matrix.tolist(), vector.tolist()
    x: list[float] = np.maximum(plain, 0.0).tolist()
    for _ in range(_NUM_SWEEPS):
        for i in range(_NUM):
            rest = sum([a[i][j] * x[j] for j in range(_NUM) if j != i])
            x[i] = max(0.0, (b[i] - rest) / a[i][i])
    return np.array(x)
