"""One variant against the control: intervals that hold at every look, and the verdict in words."""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
from msgspec import Struct

from loadtest.experiments.findings import Finding, unit_noun
from loadtest.experiments.observations import METRICS, Metric, Observations
from loadtest.statistics.effects import Effect, estimate, num_effective
from loadtest.statistics.power import Need, Needs, needs
from loadtest.statistics.sequence import radius
from loadtest.words import percent, signed, time_span

SCALE_OF_EFFECT: Final = 2.0
"""The mixture's scale, as a multiple of the effect that one looks for. An effect three times as
large as the scale needs 1.5 times the units, one a third as large needs 1.2 times."""

Kind = Literal["better", "worse", "equal", "undecided", "broken"]


class Options(Struct, frozen=True, kw_only=True):
    """The question, chosen before the data are looked at. Effects are shares: 0.1 is 10 %."""

    metric: str = "ttft"
    alpha: float = 0.05
    effect: float = 0.1  # one that is worth finding
    margin: float = 0.05  # one that is too small to matter


class Difference(Struct, frozen=True, kw_only=True):
    """A variant less the control in one metric: ratio - 1 of relative ones, else a difference.

    The truth is in [low, high] at every look with a probability of 1 - alpha. None: too little is
    known.
    """

    value: float | None
    low: float | None
    high: float | None

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes "no difference"."""
        return (self.low is not None and self.low > 0) or (self.high is not None and self.high < 0)


class Comparison(Struct, frozen=True, kw_only=True):
    """A variant against the control, in every metric; `needs` are those of the chosen one."""

    arm: str
    control: str
    metric: str
    alpha: float  # of this comparison
    differences: dict[str, Difference]
    num_units: int
    num_effective_units: float
    needs: Needs

    @property
    def difference(self) -> Difference:
        """Return the difference that decides."""
        return self.differences[self.metric]


class Verdict(Struct, frozen=True, kw_only=True):
    """A variant against the control. `is_final`: it needs no more data."""

    arm: str
    control: str
    kind: Kind
    is_final: bool
    text: str


def compare(observations: Observations, arm: str, options: Options, *, alpha: float) -> Comparison:
    """Compare a variant with the control."""
    units, is_treated, block = observations.pair(arm)
    effects = {}
    for name, metric in METRICS.items():
        sums, counts = (each[units] for each in observations.sums(name))
        effects[name] = estimate(
            sums, counts, is_treated, is_relative=metric.is_relative, block=block
        )
    chosen, metric = effects[options.metric], METRICS[options.metric]
    counts = observations.sums(options.metric)[1][units]
    num_units = int(np.count_nonzero(counts))
    at_s = [each.at_s for each in observations.requests]
    return Comparison(
        arm=arm,
        control=observations.arms[0],
        metric=options.metric,
        alpha=alpha,
        differences={
            name: _difference(effect, METRICS[name], options, alpha)
            for name, effect in effects.items()
        },
        num_units=num_units,
        num_effective_units=num_effective(counts),
        needs=needs(
            se=chosen.se if chosen.df > 0 else None,
            df=chosen.df,
            num_units=num_units,
            span_s=at_s[-1] - at_s[0],
            alpha=alpha,
            scale=SCALE_OF_EFFECT * options.effect,
            effect=_on_scale(options.effect, metric),
            margin=_on_scale(options.margin, metric),
        ),
    )


def judge(
    found: Comparison, findings: tuple[Finding, ...], design: str, options: Options
) -> Verdict:
    """Conclude from a comparison and the findings."""
    kind, text = _judged(found, findings, design, options)
    is_final = kind in ("better", "worse", "equal")
    return Verdict(arm=found.arm, control=found.control, kind=kind, is_final=is_final, text=text)


def _difference(effect: Effect, metric: Metric, options: Options, alpha: float) -> Difference:
    reach = radius(effect.se, scale=SCALE_OF_EFFECT * options.effect, alpha=alpha, df=effect.df)
    value, low, high = (
        _shown(end, metric) for end in (effect.value, effect.value - reach, effect.value + reach)
    )
    return Difference(value=value, low=low, high=high)


def _shown(value: float, metric: Metric) -> float | None:
    """Turn a logarithm of a ratio into ratio - 1; None: it is not finite."""
    if not math.isfinite(value):
        return None
    return math.expm1(min(value, 700.0)) if metric.is_relative else value


def _on_scale(effect: float, metric: Metric) -> float:
    return math.log1p(effect) if metric.is_relative else effect


# -- in words ------------------------------------------------------------------------------------


def _judged(
    found: Comparison, findings: tuple[Finding, ...], design: str, options: Options
) -> tuple[Kind, str]:
    metric, arm, control = METRICS[found.metric], found.arm, found.control
    breaking = [finding for finding in findings if finding.weight == "broken"]
    if breaking:
        codes = ", ".join(finding.code.replace("_", " ") for finding in breaking)
        return "broken", (
            f"broken: do not trust any difference between {arm} and {control} ({codes}). "
            f"{breaking[0].text}"
        )
    seen = found.difference
    value, low, high = seen.value, seen.low, seen.high
    needed = _needed(found.needs, design, options)
    if value is None or low is None or high is None:
        return "undecided", f"not decided yet: too little is known. {needed}"
    if seen.is_decided:
        is_better = (value < 0) == metric.is_lower_better
        near, far = (abs(high), abs(low)) if value < 0 else (low, high)
        unit = " %" if metric.is_relative else " points"
        said = metric.better if is_better else metric.worse
        text = (
            f"{arm} is {said} by {_size(value, metric)} than {control} ({_number(near)} to "
            f"{_number(far)}{unit}) in {metric.title}"
        )
        if near <= options.margin:
            text += f"; it may be smaller than the {percent(options.margin)} that matter"
        return "better" if is_better else "worse", text
    between = f"between {_end(low, metric)} and {_end(high, metric)}"
    if max(abs(low), abs(high)) <= options.margin:
        return "equal", (
            f"no difference larger than {percent(options.margin)}: {arm} and {control} are "
            f"equivalent in {metric.title} ({between})"
        )
    return "undecided", (
        f"not decided yet: {arm} is {between} than {control} in {metric.title}. {needed}"
    )


def _needed(need: Needs, design: str, options: Options) -> str:
    effect, margin = percent(options.effect), percent(options.margin)
    if need.to_find is None:
        return "How long it takes cannot be estimated yet"
    if need.to_find.num_more_units:
        return f"Finding a difference of {effect} needs {_more(need.to_find, design)}"
    if need.to_equal is None or not need.to_equal.num_more_units:
        return "There is enough by now for what was asked; the difference is near the bounds"
    return (
        f"A difference of {effect} would most likely have been found by now; showing that there is "
        f"none larger than {margin} needs {_more(need.to_equal, design)}"
    )


def _more(need: Need, design: str) -> str:
    more = need.num_more_units
    units = f"about {more:,} more {unit_noun(design, more)}"
    return units if need.more_s is None else f"{units} ({time_span(need.more_s)} of this traffic)"


def _end(value: float, metric: Metric) -> str:
    word = metric.better if (value < 0) == metric.is_lower_better else metric.worse
    return f"{_size(value, metric)} {word}"


def _size(value: float, metric: Metric) -> str:
    return percent(abs(value)) if metric.is_relative else f"{_number(value)} points"


def _number(share: float) -> str:
    return signed(abs(share)).removeprefix("+")
