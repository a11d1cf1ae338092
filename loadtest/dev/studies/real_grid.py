"""Find with which policy sessions end soonest, on two real engines with small caches, or simulated.

    python -m loadtest.dev.studies.real_grid --working-set 1.7 --think short --pool no
    python -m loadtest.dev.studies.real_grid --simulate              all cells, without engines
    python -m loadtest.dev.studies.real_grid --read FILE...          tables of earlier runs

Closed-loop agent sessions (`draw`) run in every cell (`cells`) under every variant: policies by
label, and other routers by command. All variants of a seed get the same sessions, from cold caches,
in alternating order. Seeds below 100 are for tuning, others for reports (`--report`). Real engines
need tests/engines/install.sh. A run takes up to a minute, and is also simulated for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from loadtest.compare.arms import UNLIMITED, arm_of
from loadtest.dev.studies import cells as grid
from loadtest.dev.studies import pair
from loadtest.dev.studies.draw import draw
from loadtest.dev.studies.grid_run import (
    DEFAULT,
    SCHEMA,
    WITHOUT_QUEUE,
    GridFile,
    GridRun,
    read_study,
    run_of,
    simulated,
)
from loadtest.dev.studies.grid_table import BASELINE, comparison, report
from loadtest.dev.studies.measured import add_arms, interrupt_on_sigterm, measured
from loadtest.dev.studies.pair import Arm, Command
from loadtest.engines.vllm import Engine
from loadtest.machine import this_machine

ARMS: Final = (
    "session_hash", "session_sticky", "least_loaded", "min_ttft", "mooncake",
    WITHOUT_QUEUE, DEFAULT, UNLIMITED,
)  # fmt: skip
TUNING_SEEDS: Final = (1, 2, 3)
REPORT_SEEDS: Final = (101, 102, 103)
_FIRST_REPORT_SEED: Final = 100
_NUM_REPEATS: Final = 5  # of a simulation that stands beside a real run

Found = Callable[[GridRun], None]


def simulate_all(
    cells: Sequence[grid.Cell],
    arms: Sequence[str],
    seeds: Sequence[int],
    progress: Progress,
    found: Found,
    num_repeats: int = 1,
) -> None:
    """Simulate every variant in every cell with every seed."""
    total = len(cells) * len(arms) * len(seeds) * num_repeats
    task = progress.add_task("simulating", total=total)
    for cell in cells:
        progress.update(task, description=cell.name)
        for seed in seeds:
            drawn = draw(cell, seed)
            is_report = seed >= _FIRST_REPORT_SEED
            for arm, repeat in product(arms, range(num_repeats)):
                found(simulated(drawn, arm, repeat=repeat, is_report=is_report))
                progress.advance(task)


def run_all(
    cells: Sequence[grid.Cell],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    progress: Progress,
    found: Found,
) -> None:
    """Run every variant in every cell with every seed, on real engines.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
    """
    draws = {(cell, seed): draw(cell, seed) for cell in cells for seed in seeds}
    num_turns = sum(len(drawn.workload.turns) for drawn in draws.values())
    task = progress.add_task("engines start", total=num_turns * len(arms))
    with tempfile.TemporaryDirectory(prefix="grid-") as folder:
        for (prefill, has_pool, tier, unlimited), group in groupby(
            product((False, True), cells),
            lambda each: (each[1].prefill, each[1].has_pool, each[1].tier, each[0]),
        ):
            of_these = [cell for _, cell in group]
            these_arms = [arm for arm in arms if (arm.label == UNLIMITED) is unlimited]
            if not these_arms:
                continue
            with pair.running(
                Path(folder),
                has_pool=has_pool,
                prefill=prefill,
                tier=tier,
                num_blocks=grid.UNLIMITED_BLOCKS if unlimited else grid.NUM_BLOCKS,
            ) as engines:
                for round_, seed in enumerate(seeds):
                    ordered = these_arms if round_ % 2 == 0 else these_arms[::-1]
                    for cell in of_these:
                        for arm in ordered:
                            progress.update(task, description=f"{cell.name}, {seed}: {arm.label}")
                            drawn = draws[cell, seed]
                            turns = asyncio.run(
                                engines.run(drawn.sessions(), arm, lambda _: progress.advance(task))
                            )
                            found(
                                run_of(
                                    drawn,
                                    arm.label,
                                    turns,
                                    round=round_,
                                    pace=engines.pace,
                                    is_report=seed >= _FIRST_REPORT_SEED,
                                    keeps_turns=True,
                                )
                            )


def beside(runs: Sequence[GridRun], progress: Progress) -> list[GridRun]:
    """Simulate the real runs whose variants are policies."""
    made: list[GridRun] = []
    task = progress.add_task("simulating the same", total=len(runs))
    for run in runs:
        if _is_policy(run.arm):
            drawn = draw(run.cell, run.seed)
            made += [
                simulated(drawn, run.arm, repeat=k, pace=run.pace) for k in range(_NUM_REPEATS)
            ]
        progress.advance(task)
    return made


def read(path: Path) -> GridFile:
    """Read the runs of an earlier command.

    Raises:
        OSError, ValueError: the file cannot be read, or is none of a grid.
    """
    return read_study(path, GridFile, SCHEMA)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.dev.studies.real_grid", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--simulate", action="store_true", help="no engines: the simulator's")
    made.add_argument(
        "--repeats", type=int, default=1, help="simulate each run so often, slightly otherwise"
    )
    made.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="tables of these runs")
    add_arms(made, ARMS)
    made.add_argument(
        "--router", action="append", default=[], metavar="LABEL=COMMAND",
        help="another router; its command has {port}, {url1}, {url2}, {metrics} in it; repeatable",
    )  # fmt: skip
    made.add_argument("--baseline", default=BASELINE, help="the variant of the ratios")
    made.add_argument(
        "--working-set", nargs="+", type=float, default=grid.WORKING_SETS, help="over the caches"
    )
    made.add_argument("--think", nargs="+", choices=grid.ALL_THINKS, default=grid.THINKS)
    made.add_argument("--pool", nargs="+", choices=("no", "yes"), default=("no", "yes"))
    made.add_argument("--shared", nargs="+", choices=grid.SHARED, default=grid.SHARED)
    made.add_argument(
        "--prefill", nargs="+", choices=grid.PREFILLS, default=grid.PREFILLS[:1],
        help="slow: another random model, whose computed tokens cost about five "
        "times as much",
    )  # fmt: skip
    made.add_argument(
        "--turns", type=int, default=grid.NUM_TURNS, help="of a session, in the median"
    )
    made.add_argument(
        "--tier", nargs="+", type=float, default=(0.0,), metavar="N",
        help="a CPU tier of N times an engine's cache; 0: none",
    )  # fmt: skip
    seeds = made.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", nargs="+", type=int, default=TUNING_SEEDS)
    seeds.add_argument(
        "--report", dest="seeds", action="store_const", const=REPORT_SEEDS,
        help=f"seeds that nothing is tuned on: {', '.join(map(str, REPORT_SEEDS))}",
    )  # fmt: skip
    made.add_argument("--json", type=Path, help="write every run there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid and print its tables; after Ctrl-C those of what is done."""
    asked = parser()
    args = asked.parse_args(argv)
    console = Console(stderr=True)
    try:
        arms = arms_of(args.arms, args.router)
        runs = [run for path in args.read or () for run in read(path).runs]
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    if min(args.working_set) <= 0.0:
        asked.error(f"--working-set {min(args.working_set):g}: must be above 0")
    if args.turns < 1 or min(args.tier) < 0.0:
        asked.error("--turns must be at least 1, --tier at least 0")
    if "yes" in args.pool and any(args.tier):
        asked.error("--tier goes with --pool no")
    if args.simulate and args.router:
        asked.error("--router: another router cannot be simulated")
    cells = grid.cells(
        args.working_set,
        args.think,
        [pool == "yes" for pool in args.pool],
        args.shared,
        args.prefill,
        args.turns,
        args.tier,
    )
    words = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "loadtest.dev.studies.real_grid", *words])

    def found(run: GridRun) -> None:
        runs.append(run)
        if args.json is not None:
            done = GridFile(machine=this_machine(), command=command, runs=tuple(runs))
            args.json.write_bytes(msgspec.json.encode(done) + b"\n")

    models: list[GridRun] = []

    def measure(progress: Progress) -> None:
        if args.simulate:
            simulate_all(cells, args.arms, args.seeds, progress, found, args.repeats)
        elif args.read is None:
            interrupt_on_sigterm()
            run_all(cells, arms, args.seeds, progress, found)
        models.extend(beside([run for run in runs if run.kind == "real"], progress))

    code = measured(measure, console)
    if runs:
        print(report(runs, args.baseline))
    if models:
        print(f"\n### Real and simulated\n\n{comparison(runs, models)}")
    return code


def arms_of(labels: Sequence[str], routers: Sequence[str]) -> list[Arm]:
    """Return the variants that the command line names.

    Raises:
        ValueError: an unknown policy, a command without its places, or a label that comes twice.
    """
    made = []
    for label in labels:
        arm_of(label)
        made.append(Arm(label=label))
    for text in routers:
        label, equals, command = text.partition("=")
        if not equals or "{port}" not in command or "{url1}" not in command:
            raise ValueError(f"--router {text!r}: not LABEL=COMMAND with {{port}} and {{url1}}")
        made.append(Arm(label=label, command=_filled(command)))
    names = [arm.label for arm in made]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"variant {min(twice)!r} is named twice")
    return made


def _filled(template: str) -> Command:
    """Make a command of a line with places in it."""

    def command(port: int, metrics_port: int, engines: Sequence[Engine]) -> list[str]:
        places = {f"url{number}": engine.url for number, engine in enumerate(engines, 1)}
        return [
            word.format(port=port, metrics=metrics_port, **places) for word in shlex.split(template)
        ]

    return command


def _is_policy(label: str) -> bool:
    try:
        arm_of(label)
    except ValueError:
        return False
    return True


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
