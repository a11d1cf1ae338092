"""A report for the terminal: variants, differences, checks, and the answer."""

from __future__ import annotations

from rich.console import Console, Group
from rich.text import Text

from loadtest.compare import answer
from loadtest.compare.report import Report
from loadtest.compare.tables import arms_table, checks_table, differences_table, limit_table
from loadtest.pages import bullets, on_terminal


def show(report: Report, console: Console) -> None:
    """Print the report; what is missing stands on top."""
    if not report.is_complete:
        console.print(Text(f"NOT COMPLETE: {report.note}", style="bold yellow"))
        console.print()
    console.print(on_terminal(arms_table(report)))
    console.print()
    limit = limit_table(report)
    if limit is not None:
        console.print(on_terminal(limit))
        console.print()
    console.print(on_terminal(differences_table(report)))
    console.print()
    console.print(on_terminal(checks_table(report), folds=(2, 3)))
    left_out = [text for text in answer.caveats(report) if "are not compared" in text]
    texts = [answer.lead(report), *left_out, *answer.limits(report)]
    console.print(Group(Text(), bullets(texts)))
