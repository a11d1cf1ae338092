"""Learn a class's cost model from first-token times, one observation at a time.

    ttft = base_ms + ms_per_token * tokens + ms_per_mtoken2 * mtoken2
         + ms_per_running * running + ms_per_cpu_token * cpu
         + ms_per_fetch * reads + ms_per_fetched_token * pooled + ms_per_disk_token * on_disk

`tokens` and `mtoken2` (token-context pairs / 1e6) are the uncached work in front of the first
token: the request's own work and the queue ahead. So queue and own prefill have one unit from the
first request on, and a wrong scale of the prior changes no order. A request reads from its own cpu
tier or from the pool, never from both. A read of the pool has tokens of the pool's memory
(`pooled`) and of its SSD (`on_disk`).

The method is weighted least squares over a window of the last observations. The newest weigh most.
It is solved again every few observations (8 unknowns, 128 rows). That is faster in the mean than a
recursive update, and past observations are judged by the current model. Six guards:

1. Relative errors count, not absolute ones: a row weighs 1 / fitted**2. A first token takes 20 ms
   or 20 s, and the small ones must be right too.
2. Outliers lose weight by the logarithm of observed / fitted (Cauchy). A hiccup (ten times too
   slow) and an unknown cache hit (ten times too fast) lose the same weight. If 5 % of the rows are
   outliers, the fit moves by a few percent.
3. The prior's proportions never fade. The prior is scaled to the median observation. It draws each
   coefficient like a guess that is good to a factor of ten. If all requests are equal (collinear
   columns), it divides the time among the coefficients. It does not constrain the engine's speed.
4. No coefficient is negative (the normal equations are solved within bounds).
5. The time to read a token has bounds relative to computing one. Over RDMA 2 % was measured, over
   TCP on a busy host more than 100 %. Few requests read, and these find short queues, so a fit
   without bounds may charge nothing.
6. A read costs what reads take in the mean. Guard 2 fits most of them, and over TCP some take
   several times as long. So the mean excess of reads over the fit is added to the price of a token.

A `StepFit` learns a class's inter-token latency from what its engines report:

    tbt_ms = base_ms + ms_per_request * running + ms_per_mtoken * tokens / 1e6

`running` requests are decoded in one step, which reads the KV of all their `tokens`. Each reading
is the mean latency between two readings of vllm:inter_token_latency_seconds, at their mean load.
Prompts that are computed in between make steps longer. So replicas of role decode have a fit of
their own. For other replicas the latency includes as many prompts as there were recently.

The method is weighted least squares with forgetting, on relative errors. A negative coefficient is
left out. A small ridge divides the time if load hardly varies.

The `Speed` of a replica is the fit of its label, times a factor of its own. Replicas with one label
share a fit. The label is `hardware`, else the model. A replica's factor is the median of observed
to fitted time of its recent first tokens, smoothed. The fit learns from observed times over the
factor. So a mislabelled or slow replica spoils no prediction of the others.
"""

from __future__ import annotations

from collections import deque
from math import isfinite, sqrt
from statistics import median
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from numpy.typing import NDArray

from policies.view import CostModel

_NUM_OF_STEPS = 3
_STEPS_FORGETTING = (
    0.99  # half of the weight lies on the last 69 readings, of all replicas of a class
)
_NUM_ENOUGH = 8
_RIDGE = 1e-4
_LEAST_MS = 0.1  # below this, errors count absolutely
_MTOKEN = 1e-6


class StepFit:
    """The inter-token latency of one replica class."""

    __slots__ = ("_cross", "_gram", "_num_readings", "_theta")

    def __init__(self) -> None:
        self._gram = np.zeros((_NUM_OF_STEPS, _NUM_OF_STEPS))
        self._cross = np.zeros(_NUM_OF_STEPS)
        self._theta: tuple[float, ...] | None = None
        self._num_readings = 0

    def observe(self, num_running: float, num_tokens: float, tbt_ms: float) -> None:
        """Add one reading to the fit; impossible values are ignored."""
        if not (isfinite(tbt_ms) and tbt_ms > 0.0 and num_running > 0.0):
            return
        row = np.array((1.0, num_running, num_tokens * _MTOKEN))
        weight = 1.0 / max(tbt_ms, _LEAST_MS) ** 2
        self._gram = _STEPS_FORGETTING * self._gram + weight * np.outer(row, row)
        self._cross = _STEPS_FORGETTING * self._cross + weight * tbt_ms * row
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
        used = list(range(_NUM_OF_STEPS))
        while used:
            gram = self._gram[np.ix_(used, used)]
            ridge = np.diag(_RIDGE * np.diag(gram) + 1e-12)
            found = np.linalg.solve(gram + ridge, self._cross[used])
            if (found >= 0.0).all():
                break
            del used[int(found.argmin())]
        theta = [0.0] * _NUM_OF_STEPS
        for position, value in zip(used, found, strict=True):
            theta[position] = float(value)
        return tuple(theta)


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


PRIOR = CostModel()

_NUM = 8
_TOKEN, _CPU, _READ, _POOLED, _DISK = 1, 4, 5, 6, 7  # columns
_READS = [_POOLED, _DISK]  # tokens of the pool
_WINDOW = 128
_FORGETTING = 0.98  # half of the weight lies on the last 35 observations
_FLOOR_MS = 5.0  # below this, errors count absolutely: no timer is better
_PRIOR_NOISE = 0.2
_PRIOR_STRENGTH = 4e-4  # (0.2 / 10)**2: noise of 20 %, prior good to a factor of 10
_FETCH_STRENGTH = 0.09  # 0.3**2: the prior of reading from the pool is good to a factor of 2
_BOUNDS = {_CPU: (0.005, 10.0), _POOLED: (0.02, 10.0), _DISK: (0.02, 10.0)}
"""Bounds of the time to read a token, in units of the time to compute one."""
_LEAST_SCALE = 0.1  # of the prior's time for computing a token, where none was measured
_MAX_EXCESS = 4.0  # a read that hangs counts as so many times the prediction, at most
_NUM_SURE = 2.0  # reads, until half of their excess over the fit counts
_RUNNING_SCALE_MS = 1.0  # the prior of ms_per_running is 0, its spread must not be
_CLIP = 3.0  # in units of the median log error; half of the weight is lost there
_MIN_SPREAD = 0.05
_ERROR_DECAY = 0.95
_FETCH_ERROR_FADES = 0.99  # with each request that does not read
_SOLVE_EVERY = 8
_NUM_REWEIGHTS = 8  # from the prior; later fits start where the last one ended
_NUM_REWEIGHTS_WARM = 2
_PACE_S = 0.05  # between observations of other routers, once the window is full

Array = NDArray[np.float64]


class Work(Struct, frozen=True, kw_only=True, gc=False):
    """The work in front of one first token at dispatch: the features of an observation."""

    num_tokens: float  # uncached: queue ahead (what is left of it) and own
    num_mtoken2: float  # (token, context) pairs of these, in millions
    num_running: int  # requests that decode already
    num_fetched_tokens: int  # own tokens read from the cpu tier or the pool
    is_from_pool: bool = False  # they are read from the pool
    num_disk_tokens: int = 0  # of these, so many from SSD

    def predict_ms(self, model: CostModel) -> float:
        """Predict the first-token time of this work."""
        return (
            model.base_ms
            + model.ms_per_token * self.num_tokens
            + model.ms_per_mtoken2 * self.num_mtoken2
            + model.ms_per_running * self.num_running
            + model.fetch_ms(
                self.num_fetched_tokens,
                from_pool=self.is_from_pool,
                num_on_disk=self.num_disk_tokens,
            )
        )

    @property
    def reads_pool(self) -> bool:
        """Whether anything is read from the pool."""
        return self.is_from_pool and self.num_fetched_tokens > 0

    @property
    def row(self) -> tuple[float, ...]:
        """The factors of the model's coefficients, in their order."""
        num_read = self.num_fetched_tokens if self.is_from_pool else 0
        return (
            1.0,
            self.num_tokens,
            self.num_mtoken2,
            self.num_running,
            self.num_fetched_tokens - num_read,
            1.0 if num_read else 0.0,
            num_read - self.num_disk_tokens,
            self.num_disk_tokens,
        )


def mtoken2(num_uncached_tokens: int, num_cached_tokens: int) -> float:
    """Count the (token, context) pairs of one prefill, in millions; see `CostModel`."""
    u = num_uncached_tokens
    return u * (num_cached_tokens + 0.5 * u) * 1e-6


def scaled(model: CostModel, factor: float) -> CostModel:
    """Return a model in which everything takes `factor` times as long."""
    return CostModel(**{name: factor * ms for name, ms in asdict(model).items()})


class CostFit:
    """The cost model of one replica class as it is learned.

    `model` is what to predict with: the prior until `trusted_after` observations are in.
    """

    __slots__ = (
        "_error_ms",
        "_fetch_error_ms",
        "_next_elsewhere_s",
        "_prior",
        "_pull",
        "_rows",
        "_theta",
        "_trusted_after",
        "_ttft_ms",
        "mixed_steps",
        "model",
        "num_observations",
        "steps",
    )

    def __init__(self, prior: CostModel = PRIOR, *, trusted_after: int = 16) -> None:
        self._prior = _coefficients(prior)
        spreads = np.where(self._prior > 0.0, self._prior, _RUNNING_SCALE_MS)
        strengths = np.full(_NUM, _PRIOR_STRENGTH)
        strengths[[_READ, *_READS]] = _FETCH_STRENGTH
        self._pull = strengths / spreads**2
        self._trusted_after = trusted_after
        self._theta = self._prior
        self.model = prior
        self._rows = np.zeros((_WINDOW, _NUM))
        self._ttft_ms = np.zeros(_WINDOW)
        self.num_observations = 0
        self.steps = StepFit()  # of replicas of role decode
        self.mixed_steps = StepFit()  # of those that compute prompts between
        self._error_ms: float | None = None
        self._fetch_error_ms: float | None = None
        self._next_elsewhere_s = 0.0

    def observe(self, work: Work, ttft_ms: float, predicted_ms: float) -> None:
        """Add one first token to the fit; `predicted_ms` was predicted at dispatch.

        Impossible values (not finite, not positive) are ignored.
        """
        if not (isfinite(ttft_ms) and ttft_ms > 0.0):
            return
        self._note_error(abs(predicted_ms - ttft_ms), predicted_ms, work)
        slot = self.num_observations % _WINDOW
        self._rows[slot] = work.row
        self._ttft_ms[slot] = ttft_ms
        self.num_observations += 1
        since_trusted = self.num_observations - self._trusted_after
        if since_trusted >= 0 and since_trusted % _SOLVE_EVERY == 0:
            self.model = self._solve()

    def takes_elsewhere(self, now_s: float) -> bool:
        """Return whether to learn from a first token of another router now: at most 20 a second.

        Every router receives a note of every request. Without a bound each would solve as often as
        all together (0.3 to 1 ms for eight observations).
        """
        if self.num_observations >= _WINDOW and now_s < self._next_elsewhere_s:
            return False
        self._next_elsewhere_s = now_s + _PACE_S
        return True

    def _note_error(self, error_ms: float, predicted_ms: float, work: Work) -> None:
        self._error_ms = _mean(self._error_ms, error_ms, _ERROR_DECAY)
        if work.reads_pool:
            most_ms = _MAX_EXCESS * max(predicted_ms, _FLOOR_MS)
            self._fetch_error_ms = _mean(self._fetch_error_ms, min(error_ms, most_ms), _ERROR_DECAY)
        elif self._fetch_error_ms is not None:
            self._fetch_error_ms = _mean(self._fetch_error_ms, error_ms, _FETCH_ERROR_FADES)

    def _solve(self) -> CostModel:
        """Fit the window, weights and coefficients in turn."""
        num = min(self.num_observations, _WINDOW)
        rows, ttft_ms = self._rows[:num], self._ttft_ms[:num]
        ages = (self.num_observations - 1 - np.arange(num)) % _WINDOW
        recency = np.power(_FORGETTING, ages, dtype=np.float64)
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
            lows, highs = _bounds(float(max(theta[_TOKEN], _LEAST_SCALE * prior[_TOKEN])))
            theta = solve_within(matrix, vector, lows, highs)
        self._theta = theta
        excess_ms = _excess_of_reads(rows, ttft_ms, rows @ theta, recency)
        noise = max(_PRIOR_NOISE, limit / _CLIP)
        error_ms = noise * np.sqrt(np.diag(np.linalg.inv(matrix)))
        coefficients = theta.copy()
        coefficients[_READS] = np.minimum(theta[_READS] + excess_ms, highs[_READS])
        return _model_of(
            coefficients,
            error_ms=self._error_ms or 0.0,
            fetch_error_ms=self._fetch_error_ms or 0.0,
            fetched_token_error_ms=float(error_ms[_POOLED]),
            disk_token_error_ms=float(error_ms[_DISK]),
        )


def _mean(before: float | None, now: float, decay: float) -> float:
    return now if before is None else decay * before + (1.0 - decay) * now


def _coefficients(model: CostModel) -> Array:
    return np.array(
        [
            model.base_ms,
            model.ms_per_token,
            model.ms_per_mtoken2,
            model.ms_per_running,
            model.ms_per_cpu_token,
            model.ms_per_fetch,
            model.ms_per_fetched_token,
            model.ms_per_disk_token,
        ]
    )


def _model_of(coefficients: Array, **errors: float) -> CostModel:
    """Make a model of its coefficients, in the order of `_coefficients`, and its errors."""
    base, token, token2, running, cpu, read, pooled, disk = coefficients.tolist()
    return CostModel(
        base_ms=base,
        ms_per_token=token,
        ms_per_mtoken2=token2,
        ms_per_running=running,
        ms_per_cpu_token=cpu,
        ms_per_fetch=read,
        ms_per_fetched_token=pooled,
        ms_per_disk_token=disk,
        **errors,
    )


def _bounds(token_ms: float) -> tuple[Array, Array]:
    """Return the bounds of each coefficient if a token takes `token_ms`."""
    lows, highs = np.zeros(_NUM), np.full(_NUM, np.inf)
    for column, (least, most) in _BOUNDS.items():
        lows[column], highs[column] = least * token_ms, most * token_ms
    return lows, highs


def _excess_of_reads(rows: Array, ttft_ms: Array, fitted: Array, recency: Array) -> float:
    """Return the mean excess of a token read from the pool over the fit; see guard 6."""
    reads = rows[:, _READ] > 0.0
    if not reads.any():
        return 0.0
    most = _MAX_EXCESS * np.maximum(fitted, _FLOOR_MS)
    clipped = np.clip(ttft_ms - fitted, -most, most)
    weight = float(recency[reads].sum())
    num_tokens = float(recency[reads] @ rows[reads][:, _READS].sum(axis=1)) / weight
    excess_ms = float(recency[reads] @ clipped[reads]) / weight
    if not reads.all():
        excess_ms -= float(recency[~reads] @ clipped[~reads]) / float(recency[~reads].sum())
    return max(0.0, excess_ms) / num_tokens * weight / (weight + _NUM_SURE)


NUM_RECENT: Final = 32
"""First tokens that are compared: with errors of 50 % their median is good to 11 %."""
_EVERY: Final = 8  # first tokens between two comparisons: as often as a fit is solved
_LEAST, _MOST = 0.5, 3.0  # of the factor
_SHORT_MS: Final = 50.0
"""Shorter times do not count: they are scheduling and network, not compute."""


class Speed:
    """One replica's speed; `fit` is that of its label."""

    __slots__ = ("_fitted", "_model", "_num_until_look", "_ratio", "_recent", "factor", "fit")

    def __init__(self, fit: CostFit) -> None:
        self.fit = fit
        self.factor = 1.0
        self._ratio: float | None = None  # the factor without its bounds; None: not known yet
        self._fitted = self._model = fit.model
        self._recent: deque[tuple[Work, float]] = deque(maxlen=NUM_RECENT)
        self._num_until_look = NUM_RECENT

    @property
    def model(self) -> CostModel:
        """What to predict with."""
        if self._fitted is not self.fit.model:
            self._scale()
        return self._model

    def observe(
        self, work: Work, ttft_ms: float, predicted_ms: float, elsewhere_s: float | None = None
    ) -> None:
        """Add one first token to the fit; arguments as of `CostFit.observe`.

        `elsewhere_s`: now, if another router saw it.
        """
        if elsewhere_s is None or self.fit.takes_elsewhere(elsewhere_s):
            self.fit.observe(work, ttft_ms / self.factor, predicted_ms / self.factor)
        self._recent.append((work, ttft_ms))
        self._num_until_look -= 1
        if self._num_until_look <= 0:
            self._num_until_look = _EVERY
            self._compare()

    def _compare(self) -> None:
        """Set the factor, if enough of the recent first tokens show it."""
        fitted = [(work.predict_ms(self.fit.model), ttft_ms) for work, ttft_ms in self._recent]
        ratios = [ttft_ms / fitted_ms for fitted_ms, ttft_ms in fitted if fitted_ms >= _SHORT_MS]
        if len(ratios) >= _EVERY:
            ratio = median(ratios)
            self._ratio = ratio if self._ratio is None else sqrt(self._ratio * ratio)
            self.factor = min(_MOST, max(_LEAST, self._ratio))
            self._scale()

    def _scale(self) -> None:
        self._fitted = self.fit.model
        self._model = scaled(self._fitted, self.factor)
