"""Run the comparison and write its page: `python -m loadtest.peers --help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.bench.rig import RigError
from loadtest.engines.process import REPOSITORY
from loadtest.machine import this_machine
from loadtest.peers import cost, forwarding, kill
from loadtest.peers.contestants import CONTESTANTS, Contestant
from loadtest.peers.page import Comparison, Row, read, with_rows, write
from loadtest.peers.placing import grid_of, place
from loadtest.runner.children import ChildDied
from loadtest.studies.grid_run import GridRun
from loadtest.studies.measured import interrupt_on_sigterm

PARTS: Final = ("forwarding", "cost", "kill", "grid")
KILL_SEEDS: Final = (1,)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.peers",
        description="Compare warmroute with other routers, and write docs/research/comparison.md.",
    )
    made.add_argument(
        "--folder", type=Path, default=Path("build/peers"), help="where others are installed"
    )
    made.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
        help=f"renew these parts: {', '.join(PARTS)} (needs `make test-engines` once)",
    )  # fmt: skip
    made.add_argument(
        "--routers", nargs="+", metavar="TEXT", help="only those with one of these in their name"
    )
    made.add_argument(
        "--grid-file", nargs="+", type=Path, metavar="FILE",
        help="take the grid from these runs of loadtest.studies.real_grid --json",
    )  # fmt: skip
    made.add_argument(
        "--out", type=Path, default=REPOSITORY / "docs/research/comparison.md", help="the page"
    )
    made.add_argument(
        "--quick", action="store_true", help="few requests: shows that it runs, measures nothing"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; what is done when it ends is written, also after Ctrl-C."""
    asked = parser()
    args = asked.parse_args(argv)
    console = Console(stderr=True)
    chosen = [
        one for one in CONTESTANTS
        if args.routers is None or any(text in one.name for text in args.routers)
    ]  # fmt: skip
    if not chosen:
        names = ", ".join(one.name for one in CONTESTANTS)
        asked.error(f"--routers: none has {' or '.join(args.routers)} in its name; known: {names}")
    try:
        found = (
            read(args.out.with_suffix(".json"))
            if args.out.with_suffix(".json").exists()
            else (Comparison(machine=this_machine(), date=""))
        )
        runs = grid_of(args.grid_file) if args.grid_file else None
    except (OSError, ValueError) as exc:
        asked.error(str(exc))

    measured: list[GridRun] = []

    def keep(run: GridRun) -> None:
        nonlocal found
        measured.append(run)
        found = replace(found, grid=tuple(measured))

    # As Ctrl-C: children are ended in order, and what was found is kept.
    interrupt_on_sigterm()
    code = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            for part in args.only:
                task = progress.add_task(part, total=None)
                load = round(os.getloadavg()[0], 2)
                if part == "grid" and runs is not None:
                    found = replace(found, grid=runs)
                elif part == "grid":
                    _install(chosen, args.folder, progress)
                    place(chosen, args.folder, progress, keep, is_quick=args.quick)
                else:
                    found = _measured(found, part, chosen, args, progress)
                found = replace(found, loads={**found.loads, part: load})
                progress.remove_task(task)
        except* KeyboardInterrupt:
            console.print("stopped: what is done is written", style="yellow")
            code = 130
        except* (
            ChildDied, RigError, RuntimeError, OSError, httpx.HTTPError,
            subprocess.CalledProcessError,
        ) as group:  # fmt: skip
            for first in group.exceptions[:1]:  # what fails together mostly fails alike
                console.print(str(first), style="red", markup=False)
            code = 1
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    write(replace(found, machine=this_machine(), date=today), args.out)
    console.print(f"wrote {args.out}")
    return code


def _measured(
    found: Comparison,
    part: str,
    chosen: Sequence[Contestant],
    args: argparse.Namespace,
    progress: Progress,
) -> Comparison:
    """Measure one part anew for the chosen contestants; the rows of others stay."""
    task = progress.add_task("", total=len(chosen))

    def step(text: str) -> None:
        progress.update(task, description=text)

    _install(chosen, args.folder, progress)
    made = cost.material(is_quick=args.quick) if part == "cost" else None
    rows: list[Row] = []
    for one in chosen:
        step(f"{part}: {one.name}")
        for seed in _seeds(part, is_quick=args.quick):
            with tempfile.TemporaryDirectory(prefix="peers-") as name:
                place = args.folder, Path(name)
                match part:
                    case "cost":
                        assert made is not None
                        measuring = cost.measure(one, made, *place, step, is_quick=args.quick)
                        rows.append(asyncio.run(measuring))
                    case "forwarding":
                        rows.append(asyncio.run(forwarding.observe(one, *place)))
                    case _:
                        rows.append(asyncio.run(kill.kill(one, seed, *place, is_quick=args.quick)))
        progress.advance(task)
    progress.remove_task(task)
    return with_rows(found, part, rows)


def _install(chosen: Sequence[Contestant], folder: Path, progress: Progress) -> None:
    task = progress.add_task("", total=len(chosen))
    for one in chosen:
        progress.update(task, description=f"{one.name}: installing")
        one.install(folder)
        progress.advance(task)
    progress.remove_task(task)


def _seeds(part: str, *, is_quick: bool) -> Sequence[int]:
    return KILL_SEEDS if part == "kill" and not is_quick else KILL_SEEDS[:1]
