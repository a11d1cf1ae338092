"""The verdict in words; it holds at every look."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from loadtest.experiments.evidence import Evidence, Options
from loadtest.experiments.findings import Finding
from loadtest.experiments.metrics import METRICS, Metric, unit_noun
from loadtest.statistics.power import Need
from loadtest.words import percent, signed, time_span

Kind = Literal["better", "worse", "equal", "undecided", "broken"]


class Verdict(Struct, frozen=True, kw_only=True):
    """A variant against the baseline. `is_final`: it needs no more data."""

    arm: str
    baseline: str
    kind: Kind
    is_final: bool
    text: str


def judge(
    evidence: Evidence, findings: tuple[Finding, ...], design: str, options: Options
) -> Verdict:
    """Conclude from a variant's evidence and the findings."""
    metric = METRICS[evidence.metric]
    kind, text = _judged(evidence, findings, design, options, metric)
    return Verdict(
        arm=evidence.arm,
        baseline=evidence.baseline,
        kind=kind,
        is_final=kind in ("better", "worse", "equal"),
        text=text,
    )


def _judged(
    evidence: Evidence,
    findings: tuple[Finding, ...],
    design: str,
    options: Options,
    metric: Metric,
) -> tuple[Kind, str]:
    arm, baseline = evidence.arm, evidence.baseline
    breaking = [finding for finding in findings if finding.weight == "broken"]
    if breaking:
        codes = ", ".join(finding.code.replace("_", " ") for finding in breaking)
        return "broken", (
            f"broken: do not trust any difference between {arm} and {baseline} ({codes}). "
            f"{breaking[0].text}"
        )
    value, low, high = evidence.value, evidence.low, evidence.high
    if value is None or low is None or high is None:
        return (
            "undecided",
            f"not decided yet: too little is known. {_needs(evidence, design, options)}",
        )
    if evidence.is_decided:
        is_better = (value < 0) == metric.is_lower_better
        said = _sided(value, metric)
        bounds = _range(value, low, high, metric)
        about = (
            ""
            if options.margin < min(abs(low), abs(high))
            else (f"; it may be smaller than the {percent(options.margin)} that matter")
        )
        return ("better" if is_better else "worse"), (
            f"{arm} is {said} than {baseline} ({bounds}) in {metric.title}{about}"
        )
    if max(abs(low), abs(high)) <= options.margin:
        return "equal", (
            f"no difference larger than {percent(options.margin)}: {arm} and {baseline} are "
            f"equivalent in {metric.title} ({_between(low, high, metric)})"
        )
    return "undecided", (
        f"not decided yet: {arm} is {_between(low, high, metric)} than {baseline} in "
        f"{metric.title}. {_needs(evidence, design, options)}"
    )


def _needs(evidence: Evidence, design: str, options: Options) -> str:
    to_find, to_equal = evidence.needs.to_find, evidence.needs.to_equal
    effect, margin = percent(options.effect), percent(options.margin)
    if to_find is None:
        return "How long it takes cannot be estimated yet"
    if to_find.num_more_units:
        return f"Finding a difference of {effect} needs {_more(to_find, design)}"
    if to_equal is None or not to_equal.num_more_units:
        return "There is enough by now for what was asked; the difference is near the bounds"
    return (
        f"A difference of {effect} would most likely have been found by now; showing that there is "
        f"none larger than {margin} needs {_more(to_equal, design)}"
    )


def _more(need: Need, design: str) -> str:
    more = need.num_more_units
    units = f"about {more:,} more {unit_noun(design, more)}"
    return units if need.more_s is None else f"{units} ({time_span(need.more_s)} of this traffic)"


def _sided(value: float, metric: Metric) -> str:
    word = metric.better if (value < 0) == metric.is_lower_better else metric.worse
    return f"{word} by {_size(value, metric)}"


def _size(value: float, metric: Metric) -> str:
    if metric.is_relative:
        return percent(abs(value))
    return f"{signed(abs(value)).removeprefix('+')} points"


def _range(value: float, low: float, high: float, metric: Metric) -> str:
    """Write the bounds in the direction of the value, the smaller change first."""
    near, far = (abs(high), abs(low)) if value < 0 else (low, high)
    unit = " %" if metric.is_relative else " points"
    return f"{_number(near)} to {_number(far)}{unit}"


def _number(share: float) -> str:
    return signed(abs(share)).removeprefix("+")


def _between(low: float, high: float, metric: Metric) -> str:
    return f"between {_end(low, metric)} and {_end(high, metric)}"


def _end(value: float, metric: Metric) -> str:
    word = metric.better if (value < 0) == metric.is_lower_better else metric.worse
    return f"{_size(value, metric)} {word}"
