"""The parts of a report on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich import table as rich_table
from rich.text import Text

from loadtest.pages.page import Table, Tone

_STYLES: Final[dict[Tone | str, str]] = {
    "good": "green",
    "bad": "red",
    "warning": "yellow",
    "soft": "dim",
    "": "",
}


def on_terminal(table: Table, *, folds: tuple[int, ...] = ()) -> rich_table.Table:
    """Lay a table out for a terminal; columns in `folds` may take several lines."""
    shown = rich_table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, name in enumerate(table.head):
        shown.add_column(
            name,
            justify="right" if column in table.numeric else "left",
            no_wrap=column not in folds,
        )
    for number, row in enumerate(table.rows):
        shown.add_row(
            *(
                Text(cell, style=_STYLES[table.tone(number, column)])
                for column, cell in enumerate(row)
            )
        )
    return shown


def bullets(texts: Iterable[str]) -> rich_table.Table:
    """List sentences, each behind a dot."""
    listed = rich_table.Table.grid(padding=(0, 1, 0, 0))
    for text in texts:
        listed.add_row("·", Text(text))
    return listed
