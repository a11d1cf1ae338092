"""What reports print on a terminal: tables of figures, lists of sentences."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def figures_table(*names: str, left: int = 1) -> Table:
    """Begin a table whose first `left` columns are words and whose other columns are figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table


def bullets(texts: Iterable[str]) -> Table:
    """List sentences, each behind a dot."""
    listed = Table.grid(padding=(0, 1, 0, 0))
    for text in texts:
        listed.add_row("·", Text(text))
    return listed
