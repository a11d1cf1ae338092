"""Prefill and decode apart against together, on two real engines and the same cores.

    python -m loadtest.studies.halves --json halves.json       nine minutes; needs real engines
    python -m loadtest.studies.halves --read halves.json       the table of an earlier run

The same agent sessions (`draw`), from cold caches, go through a router with its defaults to two
engines that do everything, with and without a pool, and to one that computes prompts and one that
answers, which share a pool. That one is a `kv_consumer`, or `kv_both`: then it stores the prompts
that it computes itself. What the engines computed is what they count themselves: in halves an
answer's `cached_tokens` says nothing of what was computed for it elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from loadtest.machine import Machine, this_machine
from loadtest.markdown import table
from loadtest.results import TurnResult, summarize
from loadtest.studies import pair
from loadtest.studies.cells import Cell
from loadtest.studies.draw import Draw, draw
from loadtest.studies.grid_run import WITHOUT_QUEUE, read_study
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.studies.pair import Arm
from router.roles import Role

SCHEMA: Final = "warmroute.halves/1"
SEEDS: Final = (101, 102)
WORKING_SETS: Final = (0.6, 1.7)

Fleet = Literal["together", "together, pool", "apart, pool", "apart, both store"]

_APART: Final[tuple[Role, Role]] = ("prefill", "decode")
_ROLES: Final[dict[Fleet, tuple[Role, ...]]] = {
    "together": (),
    "together, pool": (),
    "apart, pool": _APART,
    "apart, both store": _APART,
}
_HEADER: Final = (
    "engines", "working set", "turns", "errors", "computed", "over together", "TTFT mean, s",
    "P90, s", "between tokens, ms",
)  # fmt: skip


class HalvesRun(Struct, frozen=True, kw_only=True):
    """What one run found; times in seconds, tokens as the engines count them."""

    fleet: Fleet
    working_set: float
    seed: int
    num_turns: int
    num_errors: int
    num_prompt_tokens: int
    num_computed_tokens: int
    ttft_mean_s: float
    ttft_p90_s: float
    tbt_mean_s: float
    errors: dict[str, int] = {}  # by kind, as a turn's result names it


class HalvesFile(Struct, frozen=True, kw_only=True):
    """All runs of one command, and what they ran on."""

    schema: str = SCHEMA
    machine: Machine
    command: str
    runs: tuple[HalvesRun, ...]


def run_all(draws: Sequence[Draw], progress: Progress, found: Callable[[HalvesRun], None]) -> None:
    """Send every draw to every fleet.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
    """
    num_turns = sum(len(drawn.workload.turns) for drawn in draws)
    task = progress.add_task("engines start", total=num_turns * len(_ROLES))
    arm = Arm(label=WITHOUT_QUEUE)
    for fleet, roles in _ROLES.items():
        with (
            tempfile.TemporaryDirectory(prefix="halves-") as folder,
            pair.running(
                Path(folder),
                has_pool=fleet != "together",
                roles=roles,
                does_decode_store=fleet == "apart, both store",
            ) as engines,
        ):
            for drawn in draws:
                progress.update(task, description=f"{fleet}: {drawn.cell.working_set:g}")
                before = engines.num_computed_tokens()
                turns = asyncio.run(
                    engines.run(drawn.sessions(), arm, lambda _: progress.advance(task))
                )
                found(_run_of(fleet, drawn, turns, engines.num_computed_tokens() - before))


def _run_of(
    fleet: Fleet, drawn: Draw, turns: Sequence[TurnResult], num_computed_tokens: int
) -> HalvesRun:
    summary = summarize(turns)
    between = [turn.tbt_mean_s for turn in turns if turn.tbt_mean_s is not None]
    return HalvesRun(
        fleet=fleet,
        working_set=drawn.cell.working_set,
        seed=drawn.seed,
        num_turns=summary.num_turns,
        num_errors=summary.num_errors,
        num_prompt_tokens=summary.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p90_s=summary.ttft_p90_s,
        tbt_mean_s=fmean(between) if between else 0.0,
        errors=summary.errors,
    )


def report(runs: Sequence[HalvesRun]) -> str:
    """Lay runs out: a row for each working set and fleet, over all seeds."""
    rows = []
    for working_set in dict.fromkeys(run.working_set for run in runs):
        of_set = [run for run in runs if run.working_set == working_set]
        for fleet in dict.fromkeys(run.fleet for run in of_set):
            ours = [run for run in of_set if run.fleet == fleet]
            seeds = {run.seed for run in ours}
            base = [run for run in of_set if run.fleet == "together" and run.seed in seeds]
            num_computed = sum(run.num_computed_tokens for run in ours)
            num_base = sum(run.num_computed_tokens for run in base)
            rows.append(
                [
                    fleet,
                    f"{working_set:g}",
                    f"{sum(run.num_turns for run in ours)}",
                    f"{sum(run.num_errors for run in ours)}",
                    f"{num_computed:,}",
                    f"{num_computed / num_base:.2f}" if len(base) == len(ours) else "",
                    f"{fmean(run.ttft_mean_s for run in ours):.2f}",
                    f"{fmean(run.ttft_p90_s for run in ours):.2f}",
                    f"{fmean(run.tbt_mean_s for run in ours) * 1000:.1f}",
                ]
            )
    return table(_HEADER, rows)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.studies.halves", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument(
        "--working-set", nargs="+", type=float, default=WORKING_SETS, help="over both caches"
    )
    made.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    made.add_argument("--json", type=Path, help="write the runs there, each when it is done")
    made.add_argument("--read", type=Path, metavar="FILE", help="the table of these runs")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table; after Ctrl-C that of what is done."""
    asked = parser()
    args = asked.parse_args(argv)
    console = Console(stderr=True)
    if min(args.working_set) <= 0.0:
        asked.error(f"--working-set {min(args.working_set):g}: must be above 0")
    try:
        earlier = None if args.read is None else read_study(args.read, HalvesFile, SCHEMA)
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    if earlier is not None:
        print(report(earlier.runs))
        return 0
    words = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "loadtest.studies.halves", *words])
    runs: list[HalvesRun] = []

    def found(run: HalvesRun) -> None:
        runs.append(run)
        if args.json is not None:
            done = HalvesFile(machine=this_machine(), command=command, runs=tuple(runs))
            args.json.write_bytes(msgspec.json.encode(done) + b"\n")

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        cells = [Cell(working_set=size) for size in args.working_set]
        run_all([draw(cell, seed) for seed in args.seeds for cell in cells], progress, found)

    code = measured(measure, console)
    if runs:
        print(report(runs))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
