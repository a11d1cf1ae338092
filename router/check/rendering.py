"""A report for people."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from router.check.findings import Level, Report, gravest

_MARKS: Final[dict[Level, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}


def render(report: Report, console: Console) -> None:
    """Print a table for each subject, and a line that counts."""
    for subject in report.subjects():
        findings = report.of(subject)
        mark, colour = _MARKS[gravest(findings)]
        console.print(Text.assemble((mark, colour), " ", (subject, "bold")))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=12)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, colour = _MARKS[finding.level]
            text = Text(finding.text)
            if finding.hint and finding.level != "ok":
                text.append(f"\n→ {finding.hint}", "dim")
            table.add_row(Text(mark, colour), Text(finding.about), text)
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    console.print(_verdict(report))


def _verdict(report: Report) -> Text:
    counts = [
        (num, word)
        for num, word in (
            (report.count("error"), "wrong"),
            (report.count("warning"), "not as it should be"),
            (report.count("note"), "to note"),
        )
        if num
    ]
    told = ", ".join(f"{num} {word}" for num, word in counts)
    if report.is_well:
        return Text(f"all is well{f' ({told})' if told else ''}", "green")
    return Text(told, "red" if report.count("error") else "yellow")
