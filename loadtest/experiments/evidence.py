"""One variant against the baseline: the effect and an interval that holds at every look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.metrics import METRICS, Metric
from loadtest.experiments.observations import Ints, Observations
from loadtest.statistics.effects import Effect, estimate, num_effective
from loadtest.statistics.power import Needs, needs
from loadtest.statistics.sequence import Floats, log_evidence, radius

NUM_LOOKS: Final = 100
"""How often the growth of the verdict is drawn; looking as often is what the interval allows."""

SCALE_OF_EFFECT: Final = 2.0
"""The mixture's scale, in effects that one looks for. Too small a scale is expensive (effects three
times as large need 1.5 times the units), too large a one is cheap (a third as large: 1.2 times)."""


class Options(Struct, frozen=True, kw_only=True):
    """What is asked, before the data are looked at. Effects are shares: 0.1 is 10 %."""

    metric: str = "ttft"
    alpha: float = 0.05
    power: float = 0.8
    effect: float = 0.1  # one that is worth finding
    margin: float = 0.05  # one that is too small to matter
    adjusts_for_prompt: bool = False

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
    """An arm against the baseline in one metric.

    `value`, `low`, `high` are ratio - 1 (relative metrics) or a difference, in [low, high] at
    every look with a probability of 1 - alpha. None: too little is known. `p_value` is against
    "no difference" and holds at every look as well.
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
    variance_kept: float
    needs: Needs
    decided_at_s: float | None  # when it first excluded "no difference", unix seconds
    looks: tuple[Look, ...]

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes "no difference"."""
        return (self.low is not None and self.low > 0) or (self.high is not None and self.high < 0)


def weigh(
    observations: Observations,
    arm: str,
    baseline: str,
    options: Options,
    *,
    alpha: float,
    advance: Callable[[], None] = lambda: None,
) -> Evidence:
    """Compare an arm with the baseline; `advance` is called at each of `NUM_LOOKS` looks."""
    metric = METRICS[options.metric]
    data = _TwoArms(observations, arm, baseline, metric, options.adjusts_for_prompt)
    effect = data.effect(*observations.sums(metric.name, data.counted))
    low, high = _bounds(effect, metric, options, alpha)
    counts = observations.sums(metric.name, data.counted)[1][data.units]
    looks: list[Look] = []
    for at_s in data.times():
        looks.append(data.look(at_s, options, alpha))
        advance()
    se, df = float(effect.se), float(effect.df)
    is_known = df > 0 and math.isfinite(se)
    evidence = float(log_evidence(effect.value, se, scale=options.scale, df=df)) if is_known else 0
    num_units = int(np.count_nonzero(counts))
    return Evidence(
        arm=arm,
        baseline=baseline,
        metric=metric.name,
        is_relative=metric.is_relative,
        value=_finite(_shown(float(effect.value), metric)),
        low=low,
        high=high,
        p_value=min(1.0, math.exp(-evidence)),
        alpha=alpha,
        num_units=num_units,
        num_effective_units=num_effective(counts),
        num_blocks=None if data.block is None else int(data.block.max(initial=-1)) + 1,
        se=_finite(se),
        df=df,
        variance_kept=_finite(float(effect.variance_kept)) or 1.0,
        needs=needs(
            se=se if is_known else None,
            df=df,
            num_units=num_units,
            span_s=data.span_s(),
            alpha=alpha,
            power=options.power,
            scale=options.scale,
            effect=_on_scale(options.effect, metric),
            margin=_on_scale(options.margin, metric),
        ),
        decided_at_s=next(
            (
                look.at_s
                for look in looks
                if (look.low is not None and look.low > 0)
                or (look.high is not None and look.high < 0)
            ),
            None,
        ),
        looks=tuple(looks),
    )


class _TwoArms:
    """The units of two arms, and what of them does not change from look to look."""

    __slots__ = ("_covariate", "_metric", "_observations", "_treated", "block", "counted", "units")

    def __init__(
        self, observations: Observations, arm: str, baseline: str, metric: Metric, adjusts: bool
    ) -> None:
        self._observations = observations
        self._metric = metric
        self.counted = observations.counted(observations.window(arm, baseline))
        index = observations.arms.index
        self.units = np.flatnonzero(np.isin(observations.unit_arm, (index(arm), index(baseline))))
        self._treated = observations.unit_arm[self.units] == index(arm)
        blocks = observations.blocks()
        self.block: Ints | None = None if blocks is None else blocks[self.units]
        self._covariate: Floats | None = None
        if adjusts:
            self._covariate = observations.prompts(metric.name, self.counted)[self.units]

    def effect(self, sums: Floats, counts: Floats, *, adjusted: bool = True) -> Effect:
        """Estimate from sums over all units of the experiment."""
        return estimate(
            sums[self.units],
            counts[self.units],
            self._treated,
            is_relative=self._metric.is_relative,
            covariate=self._covariate if adjusted else None,
            block=self.block,
        )

    def times(self) -> Floats:
        """Choose when to look: equally many requests between two looks."""
        at_s = self._observations.at_s[self.counted]
        if not len(at_s):
            return np.empty(0)
        picked = np.linspace(0, len(at_s) - 1, NUM_LOOKS + 1)[1:].astype(np.int64)
        return np.unique(at_s[picked])

    def look(self, at_s: float, options: Options, alpha: float) -> Look:
        """Look at what was known at a time; without the covariate, whose sums came later."""
        sums, counts = self._observations.sums(self._metric.name, self.counted, at_s)
        effect = self.effect(sums, counts, adjusted=False)
        low, high = _bounds(effect, self._metric, options, alpha)
        return Look(
            at_s=float(at_s),
            num_units=int(np.count_nonzero(counts[self.units])),
            value=_finite(_shown(float(effect.value), self._metric)),
            low=low,
            high=high,
        )

    def span_s(self) -> float:
        """Measure how long it took to collect what counts."""
        at_s = self._observations.at_s[self.counted]
        return float(at_s[-1] - at_s[0]) if len(at_s) > 1 else 0.0


def _bounds(
    effect: Effect, metric: Metric, options: Options, alpha: float
) -> tuple[float | None, float | None]:
    reach = float(radius(effect.se, scale=options.scale, alpha=alpha, df=effect.df))
    if not math.isfinite(reach) or not math.isfinite(float(effect.value)):
        return None, None
    low, high = float(effect.value) - reach, float(effect.value) + reach
    return _finite(_shown(low, metric)), _finite(_shown(high, metric))


def _shown(value: float, metric: Metric) -> float:
    """Turn a logarithm of a ratio into ratio - 1."""
    if not metric.is_relative or not math.isfinite(value):
        return value
    return math.expm1(value) if value < 700 else math.inf


def _on_scale(effect: float, metric: Metric) -> float:
    return math.log1p(effect) if metric.is_relative else effect


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
