"""A report for the terminal: answer, table of variants, table of differences, checks."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.compare import answer
from loadtest.compare.hygiene import Outcome
from loadtest.compare.report import ArmFigures, Report
from loadtest.pictures.look import number
from loadtest.statistics import Comparison, words
from loadtest.tables import bullets, figures_table

_MARKS: Final[dict[Outcome, tuple[str, str]]] = {
    "passed": ("✓", "green"),
    "warned": ("!", "yellow"),
    "does not apply": ("·", "dim"),
}


def show(report: Report, console: Console) -> None:
    """Print the report; what makes it doubtful stands on top."""
    if not report.is_complete:
        console.print(Text(f"NOT COMPLETE: {report.note}", style="bold yellow"))
        console.print()
    console.print(arms_table(report))
    console.print()
    console.print(differences_table(report))
    console.print()
    console.print(_checks(report))
    texts = [answer.lead(report), *_left_out(report), *answer.limits(report)]
    console.print(Group(Text(), bullets(texts)))


def arms_table(report: Report) -> Table:
    """List the arms' own figures, over all turns that succeeded in each, with rounds' ranges."""
    table = figures_table(
        "arm", "turns", "failed", "TTFT", "over rounds", "P50", "P90", "P99", "turn", "hit",
        "busiest", "good",
    )  # fmt: skip
    for arm in report.arms:
        whole = arm.whole
        has_times = whole.num_turns > whole.num_errors
        times = (whole.ttft_p50_s, whole.ttft_p90_s, whole.ttft_p99_s, whole.total_mean_s)
        table.add_row(
            arm.label + (" *" if arm.label == report.setting.baseline else ""),
            f"{whole.num_turns:,}",
            Text(f"{whole.num_errors:,}", style="bold red" if whole.num_errors else ""),
            words.value("s", whole.ttft_mean_s if has_times else None),
            spread(arm),
            *(words.value("s", seconds if has_times else None) for seconds in times),
            words.value("share", answer.hit_ratio(arm)),
            "-" if arm.imbalance is None else f"{arm.imbalance:.2f} ×",
            words.value("share", arm.good_share),
        )
    return table


def spread(arm: ArmFigures) -> str:
    """Write the range of the mean first-token times over complete rounds."""
    means = [r.summary.ttft_mean_s for r in arm.rounds if r.is_complete and r.summary.ttft_mean_s]
    if len(means) < 2:
        return "-"
    unit = 1.0 if max(means) >= 10 else 1e3
    return f"{number(min(means) * unit)}–{number(max(means) * unit)}"


def differences_table(report: Report) -> Table:
    """List every measure of every arm against the baseline, over the turns common to both."""
    table = figures_table(
        "measure", "arm", report.setting.baseline, "arm's", "effect", "95 %", "rounds", "verdict",
        left=2,
    )  # fmt: skip
    table.columns[-1].justify = "left"
    groups = groupby(report.comparisons, key=lambda found: found.measure)
    for place, (measure, members) in enumerate(groups):
        if place:
            table.add_section()
        for first, found in enumerate(members):
            table.add_row(
                measure if not first else "",
                found.arm,
                *words.figures(found),
                _verdict(found),
            )
    return table


def _verdict(found: Comparison) -> Text:
    if found.is_better is None:
        return Text("no verdict" if found.verdict == "blurred" else found.verdict, style="dim")
    return Text(found.verdict, style="green" if found.is_better else "red")


def _checks(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in report.checks:
        mark, style = _MARKS[check.outcome]
        figure = Text(check.figure)
        if check.meaning:
            figure.append(f" ({check.meaning})", style="dim")
        table.add_row(Text(mark, style=style), check.name, figure)
    return table


def _left_out(report: Report) -> list[str]:
    return [text for text in answer.caveats(report) if "are not compared" in text]
