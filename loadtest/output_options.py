"""Where results go: `-o` and `--json` mean the same in every command.

    -o, --output   the file to write, or the directory if a command writes several files
    --json         print JSON instead of a table

Earlier names go on working, and no help shows them: `--out` for --output, and `--json FILE` where
--json names a file that ends with .json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class _Output(click.Option):
    """Takes its earlier names, too; its help does not show them."""

    def __init__(self, names: list[str], *, earlier: tuple[str, ...], **attributes: Any) -> None:
        super().__init__([*names, *earlier], **attributes)
        self.earlier = earlier

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        given = self.opts
        self.opts = [name for name in given if name not in self.earlier]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = given


class JsonCommand(click.Command):
    """Reads `--json FILE.json` as `--json=FILE.json`: what follows --json is no value else."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        read: list[str] = []
        for arg in args:
            if read and read[-1] == "--json" and arg.endswith(".json"):
                read[-1] = f"--json-file={arg}"
            elif arg.startswith("--json="):
                read.append(arg.replace("--json=", "--json-file=", 1))
            else:
                read.append(arg)
        return super().parse_args(ctx, read)


def output_option(
    *, is_file: bool, help: str, required: bool = False, default: Path | None = None
) -> Callable[[F], F]:
    """Add `-o` to a command, as its argument `out`: a file, or a directory."""
    return click.option(
        "-o",
        "--output",
        "out",
        cls=_Output,
        earlier=("--out",),
        type=click.Path(path_type=Path, dir_okay=not is_file, file_okay=is_file),
        metavar="FILE" if is_file else "DIRECTORY",
        required=required,
        default=default,
        show_default=default is not None,
        help=help,
    )


def json_options(*, has_file: bool = True) -> Callable[[F], F]:
    """Add `--json` as `as_json`, and the JSON's file as `json_file`, to a `JsonCommand`.

    Args:
        has_file: `-o` names the file; False: -o means something else there.
    """
    named = ("-o", "--output") if has_file else ()

    def add(command: F) -> F:
        command = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")(
            command
        )
        return click.option(
            *named,
            "json_file",
            cls=_Output,
            earlier=("--json-file",),
            hidden=not has_file,
            type=click.Path(path_type=Path, dir_okay=False, writable=True),
            metavar="FILE",
            help="File to write as JSON.",
        )(command)

    return add
