"""One variant against the baseline: the effect and an interval that holds at every look."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.metrics import METRICS, Metric
from loadtest.experiments.observations import Observations
from loadtest.statistics.effects import Effect, Floats, estimate, num_effective
from loadtest.statistics.power import Needs, needs
from loadtest.statistics.sequence import log_evidence, radius

NUM_LOOKS: Final = 100
"""Number of looks in the picture of how the verdict grew."""

SCALE_OF_EFFECT: Final = 2.0
"""The mixture's scale, as a multiple of the effect that one looks for. An effect three times as
large as the scale needs 1.5 times the units, one a third as large needs 1.2 times."""


class Options(Struct, frozen=True, kw_only=True):
    """The question, chosen before the data are looked at. Effects are shares: 0.1 is 10 %."""

    metric: str = "ttft"
    alpha: float = 0.05
    power: float = 0.8
    effect: float = 0.1  # one that is worth finding
    margin: float = 0.05  # one that is too small to matter

    @property
    def scale(self) -> float:
        """The mixture's scale, in the units of estimates."""
        return SCALE_OF_EFFECT * self.effect


class Look(Struct, frozen=True, kw_only=True):
    """What was known at one time; None: infinite."""

    at_s: float
    num_units: int
    value: float | None
    low: float | None
    high: float | None


class Evidence(Struct, frozen=True, kw_only=True):
    """A variant against the baseline in one metric.

    `value`, `low`, `high` are ratio - 1 (relative metrics) or a difference. The truth is in
    [low, high] at every look with a probability of 1 - alpha. None: too little is known.
    `p_value` is against "no difference" and holds at every look, too.
    """

    arm: str
    baseline: str
    metric: str
    is_relative: bool
    value: float | None
    low: float | None
    high: float | None
    p_value: float
    alpha: float  # of this comparison
    num_units: int
    num_effective_units: float
    num_blocks: int | None  # pairs of slots that were analysed; None: no pairs
    se: float | None
    df: float
    needs: Needs
    decided_at_s: float | None  # when it first excluded "no difference", unix seconds
    looks: tuple[Look, ...]

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes "no difference"."""
        return _is_decided(self.low, self.high)


def weigh(
    observations: Observations, arm: str, baseline: str, options: Options, *, alpha: float
) -> Evidence:
    """Compare a variant with the baseline."""
    metric = METRICS[options.metric]
    data = _TwoArms(observations, arm, baseline, metric)
    effect, num_units = data.effect()
    low, high = _bounds(effect, metric, options, alpha)
    looks = []
    for at_s in data.times():
        seen, num = data.effect(at_s)
        value = _finite(_shown(seen.value, metric))
        bounds = _bounds(seen, metric, options, alpha)
        looks.append(
            Look(at_s=float(at_s), num_units=num, value=value, low=bounds[0], high=bounds[1])
        )
    is_known = effect.df > 0
    evidence = (
        log_evidence(effect.value, effect.se, scale=options.scale, df=effect.df) if is_known else 0
    )
    return Evidence(
        arm=arm,
        baseline=baseline,
        metric=metric.name,
        is_relative=metric.is_relative,
        value=_finite(_shown(effect.value, metric)),
        low=low,
        high=high,
        p_value=min(1.0, math.exp(-evidence)),
        alpha=alpha,
        num_units=num_units,
        num_effective_units=num_effective(
            observations.sums(metric.name, data.counted)[1][data.units]
        ),
        num_blocks=None if data.block is None else int(data.block.max(initial=-1)) + 1,
        se=_finite(effect.se),
        df=effect.df,
        needs=needs(
            se=effect.se if is_known else None,
            df=effect.df,
            num_units=num_units,
            span_s=data.span_s(),
            alpha=alpha,
            power=options.power,
            scale=options.scale,
            effect=_on_scale(options.effect, metric),
            margin=_on_scale(options.margin, metric),
        ),
        decided_at_s=next((look.at_s for look in looks if _is_decided(look.low, look.high)), None),
        looks=tuple(looks),
    )


def _is_decided(low: float | None, high: float | None) -> bool:
    """Return whether an interval excludes "no difference"."""
    return (low is not None and low > 0) or (high is not None and high < 0)


class _TwoArms:
    """The data of two variants that does not change from look to look."""

    __slots__ = ("_is_treated", "_metric", "_observations", "block", "counted", "units")

    def __init__(self, observations: Observations, arm: str, baseline: str, metric: Metric) -> None:
        self._observations = observations
        self._metric = metric
        self.counted = observations.counted(observations.window(arm, baseline))
        self.units, self._is_treated, self.block = observations.pair(arm, baseline)

    def effect(self, until_s: float = np.inf) -> tuple[Effect, int]:
        """Return the effect as known at a time, and the number of units."""
        sums, counts = self._observations.sums(self._metric.name, self.counted, until_s)
        found = estimate(
            sums[self.units],
            counts[self.units],
            self._is_treated,
            is_relative=self._metric.is_relative,
            block=self.block,
        )
        return found, int(np.count_nonzero(counts[self.units]))

    def times(self) -> Floats:
        """Return the times of the looks: equally many requests between two looks."""
        at_s = self._observations.at_s[self.counted]
        if not len(at_s):
            return np.empty(0)
        picked = np.linspace(0, len(at_s) - 1, NUM_LOOKS + 1)[1:].astype(np.int64)
        return np.unique(at_s[picked])

    def span_s(self) -> float:
        """Return how long it took to collect the counted requests."""
        at_s = self._observations.at_s[self.counted]
        return float(at_s[-1] - at_s[0]) if len(at_s) > 1 else 0.0


def _bounds(
    effect: Effect, metric: Metric, options: Options, alpha: float
) -> tuple[float | None, float | None]:
    reach = radius(effect.se, scale=options.scale, alpha=alpha, df=effect.df)
    if not math.isfinite(reach):
        return None, None
    return tuple(_finite(_shown(effect.value + end, metric)) for end in (-reach, reach))  # type: ignore[return-value]


def _shown(value: float, metric: Metric) -> float:
    """Turn a logarithm of a ratio into ratio - 1."""
    if not metric.is_relative or not math.isfinite(value):
        return value
    return math.expm1(value) if value < 700 else math.inf


def _on_scale(effect: float, metric: Metric) -> float:
    return math.log1p(effect) if metric.is_relative else effect


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
