"""Tables that fit a terminal: columns are dropped by rank, and no line wraps.

No heading and no cell has a space, so that `awk` and `sort` find columns; the last cell may have
some. Help texts explain each column by `Column.about`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class Column(NamedTuple):
    """One column of a table.

    about: What it shows, for help texts.
    drop: Dropped if the terminal is narrow, the highest number first. 0: it stays.
    """

    title: str
    about: str
    drop: int = 0
    is_right: bool = False


def fitted(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    *,
    drop_empty: bool = False,
) -> Table:
    """Create a table of the columns that fit.

    Args:
        drop_empty: Drop columns that say nothing in any row, too, if they may be dropped.
    """
    from rich.measure import Measurement  # late, as in `router.cli.terminal`
    from rich.table import Table

    kept = [
        i
        for i, column in enumerate(columns)
        if not (drop_empty and column.drop and all(str(row[i]) in ("-", "") for row in rows))
    ]
    unbounded = console.options.update_width(10_000)
    while True:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        for column in (columns[i] for i in kept):
            justify: Literal["right", "left"] = "right" if column.is_right else "left"
            table.add_column(column.title, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        droppable = [i for i in kept if columns[i].drop]
        needed = Measurement.get(console, unbounded, table).maximum
        if needed <= console.width or not droppable:
            return table
        kept.remove(max(droppable, key=lambda i: columns[i].drop))


def explained(**tables: Sequence[Column]) -> str:
    """Write the columns of tables for the end of a help text, in lines that are not wrapped."""
    lines = []
    for name, columns in tables.items():
        size = max(len(column.title) for column in columns) + 2
        lines.append(f"\b\nColumns of {name}:")
        lines[-1] += "".join(f"\n  {each.title:{size}}{each.about}" for each in columns)
    return "\n\n".join(lines)
