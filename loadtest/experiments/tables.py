"""The tables of a report, for the terminal and the page."""

from __future__ import annotations

import math

from loadtest.experiments.metrics import METRICS, unit_noun
from loadtest.experiments.redecide import Redecided, WhatIf
from loadtest.experiments.report import Report
from loadtest.pages import Table
from loadtest.statistics.words import change, estimate
from loadtest.words import amount, moment, percent, time_span


def arm_table(report: Report) -> Table:
    """Lay out every metric, with a column for each variant."""
    rows = [("policy", *(", ".join(list(arm.policies)[:2]) for arm in report.arms))]
    noun = unit_noun(report.experiment.design if report.experiment else "", 2)
    rows.append((noun, *(f"{arm.num_units:,}" for arm in report.arms)))
    rows.append(
        ("requests (counted)", *(f"{a.num_requests:,} ({a.num_counted:,})" for a in report.arms))
    )
    for name, metric in METRICS.items():
        rows.append((metric.title, *(estimate(a.metrics[name], metric.unit) for a in report.arms)))
        if metric.has_percentiles:
            rows += [
                (
                    f"{metric.title}, {quantile.upper()}",
                    *(estimate(a.ttft_quantiles[quantile], metric.unit) for a in report.arms),
                )
                for quantile in report.arms[0].ttft_quantiles
            ]
    rows.append(
        (
            "known exactly / degraded / blind",
            *(
                " / ".join(percent(a.states.get(s, 0.0)) for s in ("exact", "degraded", "blind"))
                for a in report.arms
            ),
        )
    )
    return Table(
        head=("", *(arm.name for arm in report.arms)),
        rows=tuple(rows),
        caption=f"Per variant, with 95 % intervals by {noun}; they hold for one look.",
        numeric=tuple(range(1, len(report.arms) + 1)),
    )


def difference_table(report: Report) -> Table:
    """Lay out the differences to the baseline, with a column for each other variant."""
    others = [arm for arm in report.arms if arm.against]
    rows = tuple(
        (
            metric.title,
            *(change(arm.against[name], is_relative=metric.is_relative) for arm in others),
        )
        for name, metric in METRICS.items()
    )
    return Table(
        head=("", *(arm.name for arm in others)),
        rows=rows,
        caption=f"Differences to {report.baseline}, with 95 % intervals that hold for one look. "
        "With so many rows, one in twenty excludes 0 by chance.",
        numeric=tuple(range(1, len(others) + 1)),
    )


def evidence_table(report: Report) -> Table:
    """Lay out the evidence of the verdicts, with a row for each comparison."""
    noun = unit_noun(report.experiment.design if report.experiment else "", 2)
    rows = []
    for found in report.comparisons:
        low, high = ("-" if bound is None else percent(bound) for bound in (found.low, found.high))
        detectable = found.needs.detectable
        if detectable is not None and found.is_relative:
            detectable = math.expm1(detectable)
        rows.append(
            (
                found.arm,
                METRICS[found.metric].title,
                "-" if found.value is None else percent(found.value),
                f"{low} to {high}",
                f"{found.p_value:.2g}",
                f"{found.num_units:,} ({found.num_effective_units:,.0f})",
                "-" if detectable is None else percent(detectable),
                "-" if found.decided_at_s is None else moment(found.decided_at_s),
            )
        )
    confidence = percent(1 - report.comparisons[0].alpha) if report.comparisons else ""
    return Table(
        head=("variant", "metric", "difference", f"{confidence} sequence", "p",
              f"{noun} (effective)", f"found with {percent(report.options.power)}",
              "decided since"),
        rows=tuple(rows),
        caption=f"Evidence against {report.baseline}: intervals and p hold at every look.",
        numeric=(2, 3, 4, 5, 6),
    )  # fmt: skip


def what_if_table(other: WhatIf) -> Table:
    """Lay out another policy's figures, with the live ones in brackets."""
    rows = (
        (
            other.policy,
            f"{other.num_decisions:,}",
            percent(other.agreement),
            f"{amount(other.ttft_ms, 'ms')} ({amount(other.live_ttft_ms, 'ms')})",
            f"{other.uncached_tokens:,.0f} ({other.live_uncached_tokens:,.0f})",
            f"{other.fetched_tokens:,.0f} ({other.live_fetched_tokens:,.0f})",
            amount(other.regret_ms, "ms"),
            ", ".join(f"{value:,.0f}" for value in other.regret_quantiles.values()),
        ),
    )
    return Table(
        head=("policy", "decisions", "same choice", "first token", "computed tokens",
              "fetched tokens", "regret", "regret P10, P50, P90, P99, ms"),
        rows=rows,
        caption="Predictions, the live choice's in brackets. Regret: by how much the policy's "
        "choice was predicted to be sooner.",
        numeric=tuple(range(1, 8)),
    )  # fmt: skip


def redecided_table(found: Redecided) -> Table:
    """Lay out the counts of decisions made again."""
    return Table(
        head=("records", "same decision", "same choice, other costs", "other choice", "no policy"),
        rows=(
            tuple(
                f"{count:,}"
                for count in (
                    found.num_records,
                    found.num_same,
                    found.num_other_costs,
                    found.num_other_choice,
                    found.num_unknown,
                )
            ),
        ),
        numeric=(0, 1, 2, 3, 4),
    )


def heading(report: Report) -> str:
    """Describe the report in a line."""
    experiment = report.experiment
    if experiment is None or report.begin_s is None or report.end_s is None:
        return f"{report.num_records:,} records, no experiment"
    return (
        f"{experiment.name}: {experiment.design}, {report.num_units:,} "
        f"{unit_noun(experiment.design, report.num_units)}, {report.num_requests:,} requests in "
        f"{time_span(report.end_s - report.begin_s)}, since {moment(report.begin_s)}"
    )
