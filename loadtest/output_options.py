"""Where results go: `-o` and `--json` mean the same in every command.

-o, --output   the file to write, or the directory if a command writes several files
--json         print JSON instead of a table
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def output_option(
    *, is_file: bool, help: str, required: bool = False, default: Path | None = None
) -> Callable[[F], F]:
    """Add `-o` to a command, as its argument `out`: a file, or a directory."""
    return click.option(
        "-o",
        "--output",
        "out",
        type=click.Path(path_type=Path, dir_okay=not is_file, file_okay=is_file),
        metavar="FILE" if is_file else "DIRECTORY",
        required=required,
        default=default,
        show_default=default is not None,
        help=help,
    )


def json_option(command: F) -> F:
    """Add `--json` to a command, as its argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")(command)


def json_options(command: F) -> F:
    """Add `--json` as `as_json`, and `-o` as `json_file`, the file to write as JSON."""
    return click.option(
        "-o",
        "--output",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False, writable=True),
        metavar="FILE",
        help="File to write as JSON.",
    )(json_option(command))
