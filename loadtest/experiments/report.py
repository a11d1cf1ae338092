"""A report: everything about an experiment as data, which is the JSON, and on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from loadtest.experiments.comparison import (
    Comparison,
    Difference,
    Options,
    Verdict,
    compare,
    judge,
)
from loadtest.experiments.findings import Finding, SampleRatio, find, sample_ratio, unit_noun
from loadtest.experiments.observations import METRICS, Observations, assigned, observe
from loadtest.experiments.records import Named, Records, RecordsError
from loadtest.pages import Table, on_terminal
from loadtest.words import amount, moment, percent, signed, time_span

SCHEMA: Final = "warmroute.report/2"

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_STYLES: Final = {"better": "green", "worse": "red", "equal": "green", "broken": "red"}
_MARKS: Final = {"broken": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "dim")}


class Figures(Struct, frozen=True, kw_only=True):
    """One variant: means per request of counted requests, by metric."""

    name: str
    policies: dict[str, int]  # label (with parameters) -> requests
    num_units: int
    num_requests: int  # all of them
    num_counted: int
    states: dict[str, float]  # share of requests by state: exact, degraded, blind
    metrics: dict[str, float | None]
    ttft_quantiles: dict[str, float | None]


class Report(Struct, frozen=True, kw_only=True):
    """The content of `-o`. Shares and relative differences are fractions of 1, times unix seconds.

    variants: The control first.
    """

    schema: str = SCHEMA
    files: tuple[str, ...]
    num_records: int
    options: Options
    experiments: tuple[Named, ...]  # all in the records
    experiment: Named
    begin_s: float
    end_s: float
    num_units: int
    num_requests: int  # of the experiment
    num_counted: int
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]  # the worst first
    sample_ratio: SampleRatio
    variants: tuple[Figures, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def is_sound(self) -> bool:
        """Return whether no finding breaks the experiment."""
        return all(finding.weight != "broken" for finding in self.findings)


def make_report(
    records: Records,
    *,
    name: str | None = None,
    trial: str | None = None,
    options: Options | None = None,
) -> Report:
    """Report on an experiment.

    Args:
        records: See `records.load`.
        name: The experiment; None: the only one.
        trial: Id of one of its definitions; None: the newest.
        options: The question.

    Raises:
        RecordsError: there is none, it is unknown or ambiguous, or it has one variant.
        MissingExtra: scipy is not installed.
    """
    options = options or Options()
    experiment = records.choose(name, trial)
    if len(experiment.arms) < 2:
        raise RecordsError(
            f"experiment {experiment.name!r}: all records are of one variant, "
            f"{experiment.arms[0]}; there is nothing to compare it with (are the other routers' "
            "files here?)"
        )
    observations = observe(records, experiment)
    others = observations.arms[1:]
    alpha = options.alpha / len(others)
    comparisons = tuple(compare(observations, arm, options, alpha=alpha) for arm in others)
    ratio = sample_ratio(observations)
    findings = find(records, observations, ratio, observations.sums(options.metric)[1])
    if len(others) > 1:
        text = f"{len(others)} variants are compared, each at a level of alpha / {len(others)}"
        findings += (Finding(weight="note", code="several_arms", text=text),)
    return Report(
        files=records.files,
        num_records=records.num_records,
        options=options,
        experiments=records.experiments,
        experiment=experiment,
        begin_s=observations.requests[0].at_s,
        end_s=observations.requests[-1].at_s,
        num_units=observations.num_units,
        num_requests=len(observations.requests),
        num_counted=int(np.count_nonzero(observations.counts)),
        verdicts=tuple(judge(each, findings, experiment.design, options) for each in comparisons),
        findings=findings,
        sample_ratio=ratio,
        variants=tuple(_figures(observations, arm) for arm in observations.arms),
        comparisons=comparisons,
    )


def _figures(observations: Observations, arm: str) -> Figures:
    own_unit = observations.unit_arm == observations.arms.index(arm)
    own = observations.counts & (observations.arm == observations.arms.index(arm))
    requests = [each for each in observations.requests if assigned(each).arm == arm]
    states = Counter(each.state for each in requests)
    metrics: dict[str, float | None] = {}
    for name in METRICS:
        sums, counts = (float(each[own_unit].sum()) for each in observations.sums(name))
        metrics[name] = sums / counts if counts else None
    ttft = observations.numerators["ttft"][own & (observations.denominators["ttft"] > 0)]
    return Figures(
        name=arm,
        policies=dict(Counter(each.policy for each in requests).most_common()),
        num_units=len(np.unique(observations.unit[own])),
        num_requests=len(requests),
        num_counted=int(np.count_nonzero(own)),
        states={name: count / len(requests) for name, count in states.items()},
        metrics=metrics,
        ttft_quantiles={
            name: float(np.quantile(ttft, share)) if len(ttft) else None
            for name, share in _QUANTILES.items()
        },
    )


# -- on a terminal -------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print the answer first, then its limits, then the numbers."""
    console.print(Text(_heading(report), style="bold"))
    console.print()
    for verdict in report.verdicts:
        console.print(Text(verdict.text, style=f"bold {_STYLES.get(verdict.kind, '')}"))
    console.print()
    for finding in report.findings:
        mark, style = _MARKS[finding.weight]
        console.print(Text.assemble((f"{mark} ", style), finding.text))
    console.print()
    console.print(on_terminal(figures_table(report), folds=(0,)))
    confidence = percent(1 - report.comparisons[0].alpha)
    console.print(f"Brackets: with {confidence} the true difference is inside, at every look.")


def figures_table(report: Report) -> Table:
    """Lay out every metric: each variant's value, and its difference to the control."""
    noun = unit_noun(report.experiment.design)
    control, *others = report.variants
    head = ["", control.name]
    for each in others:
        head += [each.name, "difference"]
    rows = [
        _row("policy", report, lambda each: ", ".join(list(each.policies)[:2])),
        _row(noun, report, lambda each: f"{each.num_units:,}"),
        _row(
            "requests (counted)",
            report,
            lambda each: f"{each.num_requests:,} ({each.num_counted:,})",
        ),
    ]
    for name, metric in METRICS.items():
        cells = [metric.title, amount(control.metrics[name], metric.unit)]
        for each, found in zip(others, report.comparisons, strict=True):
            change = _change(found.differences[name], is_relative=metric.is_relative)
            cells += [amount(each.metrics[name], metric.unit), change]
        rows.append(tuple(cells))
        if name == "ttft":
            rows += [_quantile_row(report, quantile) for quantile in _QUANTILES]
    states = ("exact", "degraded", "blind")
    rows.append(
        _row(
            "caches known: " + " / ".join(states),
            report,
            lambda each: " / ".join(percent(each.states.get(state, 0.0)) for state in states),
        )
    )
    return Table(head=tuple(head), rows=tuple(rows), numeric=tuple(range(1, len(head))))


def _quantile_row(report: Report, quantile: str) -> tuple[str, ...]:
    title = f"{METRICS['ttft'].title}, {quantile.upper()}"
    return _row(title, report, lambda each: amount(each.ttft_quantiles[quantile], "ms"))


def _row(title: str, report: Report, cell: Callable[[Figures], str]) -> tuple[str, ...]:
    control, *others = report.variants
    cells = [title, cell(control)]
    for each in others:
        cells += [cell(each), ""]
    return tuple(cells)


def _change(found: Difference, *, is_relative: bool) -> str:
    """Write a difference with its sign and interval."""
    if found.value is None:
        return "-"
    text = f"{signed(found.value)} {'%' if is_relative else 'points'}"
    if found.low is None or found.high is None:
        return text
    return f"{text} ({signed(found.low)} to {signed(found.high)})"


def _heading(report: Report) -> str:
    experiment, noun = report.experiment, unit_noun(report.experiment.design, report.num_units)
    return (
        f"{experiment.name}: {experiment.design}, {report.num_units:,} {noun}, "
        f"{report.num_requests:,} requests in {time_span(report.end_s - report.begin_s)}, since "
        f"{moment(report.begin_s)}"
    )
