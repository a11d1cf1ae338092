"""`python -m loadtest.dev.bench [NAME ...]`: run benchmarks, show the table, write it down."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.dev.bench import report as reporting
from loadtest.dev.bench.report import Report, Section
from loadtest.dev.bench.setting import Setting

BENCHMARKS: Final = (
    "context",
    "overhead",
    "throughput",
    "streaming",
    "probes",
    "cpu",
    "decision",
    "memory",
    "stall",
    "redis",
    "foreign",
)
DEFAULT_OUT: Final = Path("docs/research/benchmarks.md")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice(BENCHMARKS), metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Small numbers: shows that it runs, measures nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File for the table, JSON beside it. [default: {DEFAULT_OUT} of a full run of all]",
)
def main(
    names: tuple[str, ...],
    quick: bool,
    out: Path | None,
) -> None:
    """Measure the router against its budgets; all benchmarks, or those named.

    \b
    context, overhead, throughput, streaming, probes, cpu, stall: a running router
    decision, memory: its parts
    redis: what routers share, on a Redis of its own
    foreign: what a request costs the routers that it does not come to
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that torch is missing
    console = Console(stderr=True)
    machine = reporting.this_machine()
    work_dir = Path(tempfile.mkdtemp(prefix="warmroute-bench-"))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        setting = Setting(work_dir=work_dir, progress=progress, quick=quick)
        sections = [
            run_one(name, setting)
            for name in setting.track(names or BENCHMARKS, "[bold]all benchmarks")
        ]
    result = Report(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        commit=_commit(),
        quick=quick,
        command=_command(names, quick=quick),
        machine=machine,
        sections=sections,
    )
    console.print(_table(result))
    if out is None and not names and not quick:
        out = DEFAULT_OUT
    if out is not None:
        reporting.write(result, out)
        console.print(f"written: {out} and {out.with_suffix('.json')}")
    failed = [section for section in sections if section.error is not None]
    for section in failed:
        console.print(f"[red]{section.name} failed:[/red] {section.error}; logs: {work_dir}")
    if failed:
        sys.exit(1)
    shutil.rmtree(work_dir)


def run_one(name: str, setting: Setting) -> Section:
    """Run one benchmark; one that fails does not end the others."""
    module = importlib.import_module(f"loadtest.dev.bench.bench_{name}")
    start_s = time.monotonic()
    error: str | None = None
    lines = []
    try:
        lines = module.run(setting)
    except Exception as exc:  # reported with the results
        error = f"{type(exc).__name__}: {exc}"
        setting.progress.console.print_exception()
    return Section(
        name=name,
        about=_about(module),
        seconds=round(time.monotonic() - start_s, 1),
        lines=lines,
        error=error,
    )


def _about(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "")


def _command(names: tuple[str, ...], *, quick: bool) -> str:
    options = ["--quick"] if quick else []
    return " ".join(("python -m loadtest.dev.bench", *names, *options))


def _commit() -> str | None:
    """Name the commit that was measured; None outside a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run(
        [git, "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _table(result: Report) -> Table:
    table = Table("what", "budget", "measured", "verdict", "note", title="warmroute benchmarks")
    for section in result.sections:
        for line in section.lines:
            verdict = line.verdict()
            color = "green" if verdict == "met" else "red"
            table.add_row(
                line.what,
                ", ".join(reporting.budget(bound, line.unit) for bound in line.budgets),
                reporting.measured(line),
                f"[{color}]{verdict}[/{color}]" if verdict else "",
                line.note,
            )
        table.add_section()
    return table


if __name__ == "__main__":
    main()
