"""`warmroute trace`: look at a workload, or write it down for other tools.

Exit status: 0 done; 2 the trace or the options are wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
from rich.console import Console

from loadtest.output_options import output_option
from loadtest.traces.description import describe, table_of
from loadtest.traces.errors import WorkloadError
from loadtest.traces.mooncake import write_trace
from loadtest.traces.options import load_workload, workload_options
from loadtest.workload import Workload


@click.group()
def trace() -> None:
    """Describe and convert workloads."""


_file = click.argument(
    "file", required=False, metavar="[FILE]", type=click.Path(path_type=Path, dir_okay=False)
)
"""The trace, as `--trace FILE` names it for every command."""


@trace.command("describe")
@_file
@workload_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def describe_command(file: Path | None, as_json: bool, **options: Any) -> None:
    """Print lengths, sessions and hit rates by cache size.

    FILE is the trace; --generate makes a workload instead.
    """
    workload = _load(file, options)
    with Console(stderr=True).status("counting"):
        figures = describe(workload)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(figures)).decode())
    else:
        Console().print(table_of(figures))


@trace.command()
@_file
@workload_options
@output_option(required=True, is_file=True, help="File to write or replace.")
def convert(file: Path | None, out: Path, **options: Any) -> None:
    """Write a workload as Mooncake JSON Lines.

    FILE is the trace to convert. The written file has sessions and delays, and no texts. Other
    tools read it (AIPerf, Dynamo's replay), and so does --trace.
    """
    workload = _load(file, options)
    try:
        write_trace(workload, out)
    except OSError as error:
        _refuse(f"{out}: {error.strerror or error}")
    skipped = f", {workload.num_skipped:,} bad lines left out" if workload.num_skipped else ""
    click.echo(f"{out}: {len(workload.turns):,} requests of {workload.name}{skipped}")


def _load(file: Path | None, options: dict[str, Any]) -> Workload:
    if file is not None:
        if options["trace"] is not None:
            raise click.UsageError("name the trace once: as FILE, or with --trace")
        options["trace"] = file
    try:
        return load_workload(**options)
    except WorkloadError as error:
        _refuse(str(error))


def _refuse(problem: str) -> NoReturn:
    click.echo(f"Error: {problem}", err=True)
    sys.exit(2)
