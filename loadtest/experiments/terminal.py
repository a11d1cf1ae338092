"""A report in the terminal: the answer first, then its limits, then the numbers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from loadtest.experiments.redecide import Redecided
from loadtest.experiments.report import Report
from loadtest.experiments.tables import (
    arm_table,
    difference_table,
    evidence_table,
    heading,
    redecided_table,
    what_if_table,
)
from loadtest.pages import Table

_STYLES = {"better": "green", "worse": "red", "equal": "green", "undecided": "", "broken": "red"}
_MARKS = {"broken": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "dim")}


def show(report: Report, console: Console) -> None:
    """Print everything."""
    console.print(Text(heading(report), style="bold"))
    console.print()
    for verdict in report.verdicts:
        console.print(Text(verdict.text, style=f"bold {_STYLES[verdict.kind]}"))
    if report.verdicts:
        console.print()
    for finding in report.findings:
        mark, style = _MARKS[finding.weight]
        console.print(Text.assemble((f"{mark} ", style), finding.text))
    if report.experiment is not None:
        for table in (evidence_table(report), arm_table(report), difference_table(report)):
            console.print()
            console.print(_rich(table))


def show_redecided(found: Redecided, console: Console) -> None:
    """Print what deciding again gave."""
    console.print(_rich(redecided_table(found)))
    if found.num_bad:
        console.print(f"{found.num_bad:,} lines were left out: no decision records")
    for one in found.disagreements:
        again = "nothing" if one.again is None else one.again
        console.print(
            Text(
                f"{one.file}:{one.line}: request {one.request_id}: {one.policy} chose "
                f"{one.recorded}, now {again} ({one.reason})",
                style="red",
            )
        )
    if found.agrees:
        console.print(Text("every record was decided again as it was", style="green"))
    if found.what_if is not None:
        console.print()
        console.print(_rich(what_if_table(found.what_if)))


def _rich(table: Table) -> RichTable:
    laid = RichTable(
        title=table.caption or None, title_justify="left", title_style="dim", box=None,
        padding=(0, 2, 0, 0),
    )  # fmt: skip
    for index, name in enumerate(table.head):
        laid.add_column(
            Text(name), justify="right" if index in table.numeric else "left", overflow="fold"
        )
    for row in table.rows:
        laid.add_row(*(Text(cell) for cell in row))
    return laid
