"""Which policy computes least, on two real engines with small caches, and as simulated.

    python -m loadtest.studies.real_grid --simulate                     all cells, simulated
    python -m loadtest.studies.real_grid --simulate --working-set 1.7 --think short --arms kv_aware

Closed-loop agent sessions (`draw`) in every cell (`cells`) under every arm, which are policies by
label. The same sessions for all arms of a seed, from cold caches. Recomputed tokens judge. Seeds
below 100 are for tuning, those from 100 on for reports; `--report` takes these.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.machine import this_machine
from loadtest.studies import cells as grid
from loadtest.studies.draw import draw
from loadtest.studies.grid_run import GridFile, GridRun, simulated
from loadtest.studies.grid_table import BASELINE, report
from policies import naming

ARMS: Final = (
    "session_hash", "session_sticky", "kv_aware", "kv_aware:gamma=0:beta=0", "least_loaded",
    "min_ttft", "mooncake",
)  # fmt: skip
TUNING_SEEDS: Final = (1, 2, 3)
REPORT_SEEDS: Final = (101, 102, 103)
_FIRST_REPORT_SEED: Final = 100


def simulate_all(
    cells: Sequence[grid.Cell], arms: Sequence[str], seeds: Sequence[int], progress: Progress
) -> list[GridRun]:
    """Simulate every arm in every cell with every seed; after Ctrl-C those that are done."""
    task = progress.add_task("simulating", total=len(cells) * len(arms) * len(seeds))
    runs: list[GridRun] = []
    try:
        for cell in cells:
            progress.update(task, description=cell.name)
            for seed in seeds:
                drawn = draw(cell, seed)
                for arm in arms:
                    runs.append(simulated(drawn, arm, is_report=seed >= _FIRST_REPORT_SEED))
                    progress.advance(task)
    except KeyboardInterrupt:
        progress.console.print("stopped: what is done follows", style="yellow")
    return runs


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.studies.real_grid", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--simulate", action="store_true", help="no engines: the simulator's")
    made.add_argument(
        "--arms", nargs="+", default=ARMS, metavar="POLICY[:PARAM=VALUE]", help="policies by label"
    )
    made.add_argument("--baseline", default=BASELINE, help="the arm of the ratios")
    made.add_argument(
        "--working-set", nargs="+", type=float, default=grid.WORKING_SETS, help="over the caches"
    )
    made.add_argument("--think", nargs="+", choices=grid.THINKS, default=grid.THINKS)
    made.add_argument("--pool", nargs="+", choices=("no", "yes"), default=("no", "yes"))
    made.add_argument("--shared", nargs="+", choices=grid.SHARED, default=grid.SHARED)
    seeds = made.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", nargs="+", type=int, default=TUNING_SEEDS)
    seeds.add_argument(
        "--report", dest="seeds", action="store_const", const=REPORT_SEEDS,
        help=f"seeds that nothing is tuned on: {', '.join(map(str, REPORT_SEEDS))}",
    )  # fmt: skip
    made.add_argument("--json", type=Path, help="write every run there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid and print its tables."""
    asked = parser()
    args = asked.parse_args(argv)
    if not args.simulate:
        asked.error("only --simulate so far")
    for arm in args.arms:
        try:
            naming.parse(arm)
        except ValueError as exc:
            asked.error(f"--arms: {exc}")
    if min(args.working_set) <= 0.0:
        asked.error(f"--working-set {min(args.working_set):g}: must be above 0")
    cells = grid.cells(
        args.working_set, args.think, [pool == "yes" for pool in args.pool], args.shared
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        runs = simulate_all(cells, args.arms, args.seeds, progress)
    if not runs:
        return 1
    print(report(runs, args.baseline))
    if args.json is not None:
        command = shlex.join(
            ["python", "-m", "loadtest.studies.real_grid", *(argv or sys.argv[1:])]
        )
        found = GridFile(machine=this_machine(), command=command, runs=tuple(runs))
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
