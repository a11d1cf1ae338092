"""A report as one HTML page with pictures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loadtest.experiments.evidence import Evidence
from loadtest.experiments.metrics import METRICS, unit_noun
from loadtest.experiments.report import Report, Times
from loadtest.experiments.tables import (
    arm_table,
    difference_table,
    evidence_table,
    heading,
)
from loadtest.extras import need
from loadtest.pages import Figure, Note, Page, Section, render
from loadtest.pictures import experiment as pictures
from loadtest.words import percent

_KINDS = {"better": "good", "worse": "bad", "equal": "good", "undecided": "plain", "broken": "bad"}
_WEIGHTS = {"broken": "bad", "warning": "warning", "note": "plain"}

Part = Note | Figure


def html(report: Report, times: Times, *, command: str) -> str:
    """Write the page.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    need("matplotlib")
    experiment = report.experiment
    title = f"Experiment {experiment.name}" if experiment else "Experiment"
    lead = " ".join(_sentence(verdict.text) for verdict in report.verdicts) or heading(report)
    sections = [_answer(report), *_experiment_sections(report, times)]
    return render(
        Page(
            title=title,
            lead=lead,
            sections=tuple(sections),
            footer=f"{command}\n{heading(report)}\nfiles: {', '.join(report.files)}",
        )
    )


def _answer(report: Report) -> Section:
    verdicts = [
        Note(text=_sentence(verdict.text), kind=_KINDS[verdict.kind])  # type: ignore[arg-type]
        for verdict in report.verdicts
    ]
    findings = [
        Note(text=_sentence(finding.text), kind=_WEIGHTS[finding.weight])  # type: ignore[arg-type]
        for finding in report.findings
    ]
    return Section(title="What came out, and what limits it", parts=(*verdicts, *findings))


def _experiment_sections(report: Report, times: Times) -> list[Section]:
    if report.experiment is None or report.sample_ratio is None:
        return []
    metric = METRICS[report.options.metric]
    noun = unit_noun(report.experiment.design, 2)
    ratio = report.sample_ratio
    return [
        Section(
            title="How the verdict grew",
            parts=(
                *_figure(
                    lambda: pictures.growth(
                        {c.arm: _growth(c) for c in report.comparisons},
                        baseline=str(report.baseline),
                        margin=report.options.margin,
                        what=f"{metric.title}, {'%' if metric.is_relative else 'points'}",
                    ),
                    alt="difference to the baseline over time, with an interval that narrows",
                    caption=f"With a probability of {percent(1 - report.options.alpha)} the true "
                    "difference never leaves its band, however often you look. It is decided when "
                    "the band leaves zero, or stays inside the grey band.",
                ),
                evidence_table(report),
            ),
        ),
        Section(
            title="The variants",
            parts=(
                arm_table(report),
                difference_table(report),
                *_figure(
                    lambda: pictures.distributions(times.by_arm),
                    alt="distribution of first-token times, a curve per variant",
                    caption="First-token times of counted requests; further left is sooner.",
                ),
                *_figure(
                    lambda: pictures.sources({arm.name: arm.sources for arm in report.arms}),
                    alt="prompt tokens per request by source, a bar per variant",
                    caption="Where prompt tokens came from.",
                ),
            ),
        ),
        Section(
            title="Sample ratio",
            parts=_figure(
                lambda: pictures.ratio(ratio.seen, ratio.expected, noun),
                alt=f"{noun} per variant beside the expected number",
                caption=f"p = {ratio.p_value:.2g}",
            ),
        ),
    ]


def _figure(make: Callable[[], bytes | None], *, alt: str, caption: str) -> tuple[Part, ...]:
    svg = make()
    if svg is None:
        return (Note(text="Nothing to draw yet."),)
    return (Figure(svg=svg, alt=alt, caption=caption),)


def _growth(evidence: Evidence) -> pictures.Growth:
    def column(name: str, unknown: float) -> np.ndarray:
        values = [getattr(look, name) for look in evidence.looks]
        return np.array([unknown if value is None else value for value in values], dtype=float)

    return pictures.Growth(
        at_s=column("at_s", 0.0),
        value=column("value", np.nan),
        low=column("low", -np.inf),
        high=column("high", np.inf),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
