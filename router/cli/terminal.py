"""What commands write: colour on a terminal, plain text elsewhere and with NO_COLOR; errors."""

from __future__ import annotations

import os
import shutil
import sys
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

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
