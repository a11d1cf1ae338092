"""Tables that fit a terminal: columns are dropped by rank, and no line wraps.

No heading and no cell has a space, so that `awk` and `sort` find columns; the last cell may have
some. Help texts explain each column by `Column.about`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

GAP: Final = 1  # between two columns
_LEAST_LAST: Final = 22  # characters of the last column, if it is of text


class Column(NamedTuple):
    """One column of a table.

    about: What it shows, for help texts.
    drop: Dropped if the terminal is narrow, the highest number first. 0: it stays.
    is_text: The last one: it takes what room is left, and its end is cut.
    """

    title: str
    about: str
    drop: int = 0
    is_right: bool = False
    is_text: bool = False


def shown(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Choose the columns that fit.

    Args:
        columns: All of them.
        widths: What each needs, its heading included.
        width: Of the terminal.

    Returns:
        The positions of those that are shown, in order.
    """
    kept = list(range(len(columns)))

    def needed() -> int:
        each = [min(widths[i], _LEAST_LAST) if columns[i].is_text else widths[i] for i in kept]
        return sum(each) + GAP * (len(kept) - 1)

    while needed() > width:
        droppable = [i for i in kept if columns[i].drop]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda i: columns[i].drop))
    return kept


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """Create a table of the columns that fit; the last one's text is `cut`."""
    from rich.table import Table  # late, as in `router.cli.terminal`
    from rich.text import Text

    cells = [[each if isinstance(each, Text) else Text(each) for each in row] for row in rows]
    widths = [
        max([len(column.title), *(row[i].cell_len for row in cells)])
        for i, column in enumerate(columns)
    ]
    kept = shown(columns, widths, width)
    taken = sum([widths[i] + GAP for i in kept if not columns[i].is_text])
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for i in kept:
        column = columns[i]
        table.add_column(
            column.title,
            justify="right" if column.is_right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if column.is_text else min(widths[i], width),
        )
    for row in cells:
        for i in kept:
            if columns[i].is_text:
                row[i] = Text(cut(row[i].plain, width - taken), row[i].style)
        table.add_row(*(row[i] for i in kept))
    return table


def without_empty(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int
) -> Table:
    """Create such a table without columns that say nothing in any row, if these may be dropped."""
    kept = [
        i
        for i, column in enumerate(columns)
        if not column.drop or any(str(row[i]) not in ("-", "") for row in rows)
    ]
    return fitted([columns[i] for i in kept], [[row[i] for i in kept] for row in rows], width)


def cut(text: str, room: int) -> str:
    """Shorten a list of items, the most important first: those without room are only counted."""
    items = text.split(", ")
    for num in range(len(items), 0, -1):
        left = len(items) - num
        shorter = ", ".join([*items[:num], *([f"{left} more"] if left else [])])
        if len(shorter) <= room:
            return shorter
    first = items[0] if len(items[0]) + 2 <= room else items[0][: max(0, room - 2)]
    return f"{first} …"


def explained(**tables: Sequence[Column]) -> str:
    """Write the columns of tables for the end of a help text, in lines that are not wrapped."""
    lines = []
    for name, columns in tables.items():
        size = max(len(column.title) for column in columns) + 2
        lines.append(f"\b\nColumns of {name}:")
        lines[-1] += "".join(f"\n  {each.title:{size}}{each.about}" for each in columns)
    return "\n\n".join(lines)
