"""What commands write: colour on a terminal, plain text elsewhere and with NO_COLOR; errors.

Tables fit a terminal: columns are dropped by rank, and no line wraps. No heading and no cell has a
space, so that `awk` and `sort` find columns; the last cell may have some. Help texts explain each
column by `Column.about`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, TextIO

import click

from router.base.errors import ConfigError, ConfigErrors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WIDE: Final = 110  # columns of a table that no terminal shows


def is_coloured(stream: TextIO) -> bool:
    """Return whether escape sequences may be written to a stream (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def drawing(width: int = _WIDE) -> Console:
    """Create a console to draw on; `drawn` returns the text, for stdout.

    Args:
        width: Columns, if stdout is not a terminal.
    """
    from rich.console import Console  # late: `--help` should not wait for it

    is_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if is_terminal else width
    return Console(
        file=StringIO(),
        width=columns,
        markup=False,
        highlight=False,
        force_terminal=is_coloured(sys.stdout),
    )


def drawn(console: Console) -> str:
    """Return what was drawn."""
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def grid(*left: str, right: tuple[str, ...] = (), last: str | None = None, gap: int = 2) -> Table:
    """Create a table: columns of names, of numbers, and one of text that may wrap."""
    from rich.table import Table  # late, as in `drawing`

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def refuse(error: ConfigError | str) -> NoReturn:
    """Print what is wrong with the configuration, a line for each error; end with status 2."""
    name = click.style("Error:", fg="red", bold=True)
    for each in error.errors if isinstance(error, ConfigErrors) else (error,):
        message = each.message if isinstance(each, ConfigError) else each
        click.echo(f"{name} {message}", err=True)
    sys.exit(2)


def one_line(text: str) -> str:
    """Return a text without line ends and control characters: engines name models as they like."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))


class Formatter(click.HelpFormatter):
    """Help with bold headings and coloured names; click removes both where there is no terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        coloured = [(click.style(name, fg="cyan"), text) for name, text in rows]
        super().write_dl(coloured, col_max, col_spacing)


Cell = str | tuple[str, str]
"""A text, or one with its style."""


class Column(NamedTuple):
    """One column of a table.

    about: What it shows, for help texts.
    cell: Makes its cell of what a row is about.
    drop: Dropped if the terminal is narrow, the highest number first. 0: it stays.
    """

    title: str
    about: str
    cell: Callable[[Any], Cell]
    drop: int = 0
    is_right: bool = False


def cells(columns: Sequence[Column], items: Iterable[Any]) -> list[list[Cell]]:
    """Make the cells of a row for each item."""
    return [[column.cell(each) for column in columns] for each in items]


def fitted(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    drop_empty: bool = False,
) -> Table:
    """Create a table of the columns that fit.

    Args:
        drop_empty: Drop columns that say nothing in any row, too, if they may be dropped.
    """
    from rich.measure import Measurement  # late, as in `router.cli.terminal`
    from rich.table import Table
    from rich.text import Text

    kept = [
        i
        for i, column in enumerate(columns)
        if not (drop_empty and column.drop and all(row[i] in ("-", "") for row in rows))
    ]
    unbounded = console.options.update_width(10_000)
    while True:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        for column in (columns[i] for i in kept):
            justify: Literal["right", "left"] = "right" if column.is_right else "left"
            table.add_column(column.title, justify=justify, no_wrap=True)
        for row in rows:
            line = (row[i] for i in kept)
            table.add_row(*(each if isinstance(each, str) else Text(*each) for each in line))
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


_WELL: Final = ("cached", "new", "last_block")
"""Tokens of these causes are as they should be."""

_MAX_NAME: Final = 24  # of a session
_BAR: Final = 6  # characters
_SHORT_MS: Final = 100.0  # a wait too short to be shown


def again(tokens: Mapping[str, int] | None) -> dict[str, int]:
    """Select the tokens that were computed again, by cause, the largest first."""
    found = [(cause, num) for cause, num in (tokens or {}).items() if num and cause not in _WELL]
    return dict(sorted(found, key=lambda pair: -pair[1]))


def listed(tokens: Mapping[str, int]) -> str:
    """Write tokens by cause, as in `evicted 1,024, moved 64`."""
    return ", ".join(f"{cause} {num:,}" for cause, num in tokens.items())


def share(part: float, whole: float) -> str:
    """Write a share in percent; "-": there is no whole."""
    return f"{part / whole:.0%}" if whole else "-"


def bar(ratio: float | None) -> str:
    """Draw a ratio as a bar with its number, without a space; "-": it is not known."""
    if ratio is None:
        return "-"
    full = round(min(1.0, max(0.0, ratio)) * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)}{ratio:.0%}"


def cell_of_duration(ms: float | None) -> str:
    """Write a duration without a space; "-": it is not known."""
    if ms is None:
        return "-"
    return f"{ms:,.0f}ms" if ms < 1000 else f"{ms / 1000:,.1f}s"


def waiting(line: Mapping[str, Any]) -> str:
    """Write how a request waits, as `WaitingRoom.describe` has it."""
    return (
        f"request {line['request']} waits for {line['for'] or 'its turn'}: "
        f"{line['waited_s']:,.0f} s so far, {num(line['before'], 'request')} before it, "
        f"first in {line['late_s']:,.0f} s at the latest"
    )


def waited(line: Mapping[str, Any]) -> str:
    """Write what a finished request waited for; empty: it waited for less than 0.1 s."""
    is_long = line["waited_for"] is not None and line["waited_ms"] >= _SHORT_MS
    return f"waited for {line['waited_for']}" if is_long else ""


def cell_of_name(name: str | None) -> str:
    """Write a name without a space, as a cell of a table; "-": there is none."""
    return "_".join(name.split()) if name else "-"


def titles(state: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the clients' own ids of sessions, by ours; empty: they are not shown."""
    found: Mapping[str, str] = state["sessions"].get("titles", {})
    return found


def session_name(name: str | None, names: Mapping[str, str]) -> str:
    """Return what a session is called, as a cell of a table."""
    title = cell_of_name(names.get(name or "", name or ""))
    return title if len(title) <= _MAX_NAME else f"{title[: _MAX_NAME - 1]}…"


def money(amount: float | None) -> str:
    """Write an amount of money; "-": no price is known."""
    if amount is None:
        return "-"
    if 0 < amount < 0.0001:
        return "<0.0001"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.4f}"


def age(seconds: float) -> str:
    """Write how long something has run, in its largest unit."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def clock(unix_s: float) -> str:
    """Write a time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def num(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
