"""Measure other routers and write what was found: `python -m loadtest.dev.peers --help`."""

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

from loadtest.dev.bench.rig import RigError
from loadtest.dev.peers import aiperf, collapse, cost
from loadtest.dev.peers.contestants import CONTESTANTS, Contestant
from loadtest.dev.peers.page import (
    Comparison,
    read,
    with_aiperf,
    with_collapse,
    with_costs,
    write,
)
from loadtest.dev.peers.placing import grid_of, place
from loadtest.dev.studies.grid_run import GridRun
from loadtest.dev.studies.measured import interrupt_on_sigterm
from loadtest.engines.process import REPOSITORY
from loadtest.extras import need
from loadtest.machine import this_machine
from loadtest.runner.children import ChildDied

PARTS: Final = ("cost", "grid", "aiperf", "collapse")
_PICTURE: Final = "../images/comparison.svg"  # from the JSON


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.dev.peers",
        description="Compare warmroute with other routers; `make docs` then fills the page.",
    )
    made.add_argument(
        "--folder", type=Path, default=Path("build/peers"), help="where others are installed"
    )
    made.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
        help=f"measure these parts: {', '.join(PARTS)} (needs `make test-engines` once)",
    )  # fmt: skip
    made.add_argument(
        "--routers", nargs="+", metavar="TEXT", help="only those with one of these in their name"
    )
    made.add_argument(
        "--grid-file", nargs="+", type=Path, metavar="FILE",
        help="take the grid from these runs of loadtest.dev.studies.real_grid --json",
    )  # fmt: skip
    made.add_argument(
        "--seeds", nargs="+", type=int, default=aiperf.SEEDS, help="of AIPerf's sessions"
    )
    loads = {load.name: load for load in collapse.LOADS}
    made.add_argument(
        "--load", nargs="+", choices=loads, default=tuple(loads), metavar="NAME",
        help=f"of collapse: contexts over caches; {', '.join(loads)}",
    )  # fmt: skip
    made.add_argument(
        "--engines",
        choices=("simulated", "emulated", "real"),
        default="simulated",
        help="of collapse; simulated: under policies of warmroute, without another router",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "docs/research/comparison.json",
        help="what was measured; the picture goes to ../images beside it",
    )
    made.add_argument(
        "--quick", action="store_true", help="few requests: shows that it runs, measures nothing"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write what is done when it ends, also after Ctrl-C."""
    asked = parser()
    args = asked.parse_args(argv)
    need("matplotlib")
    console = Console(stderr=True)
    chosen = [
        one for one in CONTESTANTS
        if args.routers is None or any(text in one.name for text in args.routers)
    ]  # fmt: skip
    if not chosen:
        names = ", ".join(one.name for one in CONTESTANTS)
        asked.error(f"--routers: none has {' or '.join(args.routers)} in its name; known: {names}")
    try:
        found = read(args.out) if args.out.exists() else Comparison(machine=this_machine(), date="")
        runs = grid_of(args.grid_file) if args.grid_file else None
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    loads = [load for load in collapse.LOADS if load.name in args.load]
    measured: list[GridRun] = []

    def keep(run: GridRun) -> None:
        nonlocal found
        measured.append(run)
        found = replace(found, grid=tuple(measured))

    def keep_aiperf(run: aiperf.AiperfRun) -> None:
        nonlocal found
        found = with_aiperf(found, run)

    def keep_collapse(run: collapse.CollapseRun) -> None:
        nonlocal found
        found = with_collapse(found, run)

    interrupt_on_sigterm()  # as Ctrl-C: processes are ended in order, and results are kept
    code = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            for part in args.only:
                load = round(os.getloadavg()[0], 2)
                match part:
                    case "grid" if runs is not None:
                        found = replace(found, grid=runs)
                    case "collapse" if args.engines == "simulated":
                        collapse.simulate_all(loads, progress, keep_collapse)
                    case "collapse":
                        _install(chosen, args.folder, progress)
                        collapse.run_all(
                            chosen, loads, args.folder, progress, keep_collapse,
                            engines=args.engines,
                            longest_s=5.0 if args.quick else collapse.LONGEST_S,
                        )  # fmt: skip
                    case "aiperf":
                        _install(chosen, args.folder, progress)
                        aiperf.run_all(
                            chosen, args.seeds, args.folder, progress, keep_aiperf,
                            num_sessions=1 if args.quick else aiperf.NUM_SESSIONS,
                        )  # fmt: skip
                    case "cost":
                        _install(chosen, args.folder, progress)
                        found = with_costs(found, _costs(chosen, args, progress))
                    case _:
                        _install(chosen, args.folder, progress)
                        place(chosen, args.folder, progress, keep, is_quick=args.quick)
                found = replace(found, loads={**found.loads, part: load})
        except* KeyboardInterrupt:
            console.print("stopped: what is done is written", style="yellow")
            code = 130
        except* (
            ChildDied, RigError, RuntimeError, OSError, httpx.HTTPError,
            subprocess.SubprocessError,
        ) as group:  # fmt: skip
            console.print(str(group.exceptions[0]), style="red", markup=False)
            code = 1
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    found = replace(found, machine=this_machine(), date=today)
    write(found, args.out, args.out.parent / _PICTURE)
    console.print(f"wrote {args.out}; `make docs` fills the page")
    return code


def _costs(
    chosen: Sequence[Contestant], args: argparse.Namespace, progress: Progress
) -> list[cost.Cost]:
    task = progress.add_task("", total=len(chosen))
    made = cost.material(is_quick=args.quick)
    costs = []
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix="peers-") as logs:
            measuring = cost.measure(
                one,
                made,
                args.folder,
                Path(logs),
                lambda text: progress.update(task, description=text),
                is_quick=args.quick,
            )
            costs.append(asyncio.run(measuring))
        progress.advance(task)
    progress.remove_task(task)
    return costs


def _install(chosen: Sequence[Contestant], folder: Path, progress: Progress) -> None:
    task = progress.add_task("", total=len(chosen))
    for one in chosen:
        progress.update(task, description=f"{one.name}: installing")
        one.install(folder)
        progress.advance(task)
    progress.remove_task(task)
