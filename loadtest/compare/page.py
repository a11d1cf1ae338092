"""A report as one HTML file: the answer, what limits it, pictures, every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from loadtest import pictures
from loadtest.compare import answer
from loadtest.compare.report import Report, turns_by_arm
from loadtest.compare.tables import (
    arms_table,
    checks_table,
    differences_table,
    limit_table,
    rounds_table,
)
from loadtest.extras import MissingExtra
from loadtest.pages import Figure, Note, Page, Section, Table
from loadtest.results import Run

Part = Note | Table | Figure


def make_page(report: Report, runs: Sequence[Run]) -> Page:
    """Lay the report out; without matplotlib it says so in the place of pictures."""
    setting = report.setting
    return Page(
        title=f"Comparison: {', '.join(setting.labels)}",
        lead=answer.lead(report),
        sections=(
            Section(title="Differences", parts=tuple(_differences(report))),
            Section(title="The variants", parts=tuple(_arms(report, runs))),
            Section(title="Can it be trusted?", parts=(checks_table(report),)),
            Section(title="What was run", parts=tuple(map(_plain, answer.describe(report)))),
            Section(title="What this cannot say", parts=tuple(map(_plain, answer.limits(report)))),
        ),
        footer=(
            f"warmroute {report.machine.warmroute}, Python {report.machine.python} on "
            f"{report.machine.system}, {report.machine.num_cpus} CPUs. Made again from the run "
            "files with: warmroute compare --from DIR"
        ),
    )


def _differences(report: Report) -> Iterable[Part]:
    for text in answer.caveats(report):
        yield Note(text=text, kind="warning")
    if report.is_complete and all(check.outcome != "warned" for check in report.checks):
        yield Note(text="Every check passed.", kind="good")
    for text in answer.paragraphs(report):
        yield Note(text=text)
    yield from _picture(
        lambda: pictures.forest(report.comparisons, report.setting.labels),
        alt="Each measure of each variant as a ratio to the baseline, with its interval",
        caption="Full marks are differences; hollow ones are within the spread, grey ones have "
        "no verdict.",
        absent="No two variants have turns in common: there is nothing to compare.",
    )
    yield differences_table(report)


def _arms(report: Report, runs: Sequence[Run]) -> Iterable[Part]:
    arms = turns_by_arm(report.setting, runs)
    yield from _picture(
        lambda: pictures.first_tokens(arms),
        alt="Distribution of first-token times of each variant",
        caption="First-token times; faint lines are single rounds.",
        absent="No turn has a first-token time.",
    )
    yield from _picture(
        lambda: pictures.origins(arms),
        alt="Prompt tokens per turn by where they came from",
        caption="Where prompt tokens came from: engines report how many were cached, the router "
        "in which tier.",
        absent="No engine reported how many tokens were cached.",
    )
    yield arms_table(report)
    limit = limit_table(report)
    if limit is not None:
        yield limit
    yield rounds_table(report)


def _picture(
    make: Callable[[], bytes | None], *, alt: str, caption: str, absent: str
) -> Iterable[Part]:
    try:
        svg = make()
    except MissingExtra as error:
        yield Note(text=f"No picture: {error}.", kind="warning")
        return
    yield Note(text=absent) if svg is None else Figure(svg=svg, alt=alt, caption=caption)


def _plain(text: str) -> Note:
    return Note(text=text)
