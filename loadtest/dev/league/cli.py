"""Run a league and print its table: `python -m loadtest.dev.league --help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, get_args

from msgspec.structs import fields, replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.dev.league import replicas
from loadtest.dev.league.cell import Cell, Engines, Kind, Prefill
from loadtest.dev.league.routers import DEFAULT, OTHERS, Router, router_of
from loadtest.dev.league.run import LeagueRun, run, simulated
from loadtest.dev.league.table import League, read, report, write
from loadtest.engine_model.time_model import PRESETS
from loadtest.machine import this_machine
from loadtest.runner import TargetError
from loadtest.runner.children import ChildDied

_CHOICES: Final[dict[str, Sequence[str]]] = {
    "engines": get_args(Engines), "prefill": get_args(Prefill), "kind": get_args(Kind),
    "preset": tuple(PRESETS),
}  # fmt: skip
_MOST_WASTED: Final = 0.01
"""The share of a run for which a prompt may wait so that it does not delay others: without that
rule, output at 1.7 caches fell by 30 %."""

_HELP: Final = {
    "engines": "real vLLM (CPU), emulated, or simulated in virtual time (routers of ours only)",
    "num_replicas": "replicas",
    "num_blocks": "blocks of a replica's cache",
    "block_size": "tokens of a block",
    "prefill": "of real replicas; slow: six times as many layers",
    "preset": "time model of emulated and simulated replicas",
    "tier": "a CPU tier of so many caches; 0: none",
    "has_pool": "replicas share a Mooncake pool (real, simulated)",
    "kind": "traffic; agents pause 0.3 s (P90 10 s), agents-5s 5.2 s",
    "trace": "read chats from this Mooncake trace",
    "working_set": "contexts of live agents over all caches",
    "num_live": "live agents, instead of --working-set",
    "num_turns": "turns of an agent, in the median",
    "num_output_tokens": "an agent's answer in the median, before --scale",
    "scale": "factor for all lengths; 0.1 fits engines of 1,200 blocks of 32",
    "scale_time": "factor for arrivals and pauses of chats",
    "rate": "chats that begin in a second",
    "warm_up_s": "seconds that do not count",
    "seconds": "seconds that count",
}


def parser() -> argparse.ArgumentParser:
    """Describe the command line; the options of a cell are its fields."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.dev.league",
        description="Put routers before the same replicas, under constant load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--routers", nargs="+", default=DEFAULT, metavar="NAME",
        help="policies of ours by label (POLICY[:PARAM=VALUE,…], queue.KEY=VALUE); unlimited: "
        f"ours before caches that never evict; {', '.join(OTHERS)}",
    )  # fmt: skip
    for field in fields(Cell):
        flag = f"--{field.name.removeprefix('num_').removeprefix('has_').replace('_', '-')}"
        if field.name == "has_pool":
            made.add_argument(flag, dest=field.name, action="store_true", help=_HELP[field.name])
            continue
        kind: Callable[[str], Any] = type(field.default) if field.default is not None else str
        made.add_argument(
            flag,
            dest=field.name,
            type=int if field.name == "num_live" else kind,
            choices=_CHOICES.get(field.name),
            default=field.default,
            help=_HELP[field.name],
        )
    made.add_argument("--seeds", nargs="+", type=int, default=(1,), help="a round for each")
    made.add_argument(
        "--folder", type=Path, default=Path("build/routers"), help="where others are installed"
    )
    made.add_argument("--json", type=Path, help="write the runs there, behind those in it")
    made.add_argument("--read", type=Path, metavar="FILE", help="print the table of this file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and print the table of what is done, also after Ctrl-C."""
    asked = parser()
    args = asked.parse_args(argv)
    console = Console(stderr=True)
    words = sys.argv[1:] if argv is None else argv
    league = League(
        machine=this_machine(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "loadtest.dev.league", *words]),
        load=round(os.getloadavg()[0], 1),
    )
    try:
        if args.read is not None:
            print(report(read(args.read).runs))
            return 0
        routers = [router_of(name) for name in args.routers]
        cell = Cell(**{field.name: getattr(args, field.name) for field in fields(Cell)})
        if args.json is not None and args.json.exists():
            league = replace(league, runs=read(args.json).runs)
    except (OSError, ValueError) as exc:
        asked.error(str(exc))

    num_earlier = len(league.runs)

    def found(made: LeagueRun) -> None:
        nonlocal league
        league = replace(league, runs=(*league.runs, made))
        if args.json is not None:
            write(league, args.json)

    _interrupt_on_sigterm()
    code = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            run_all(routers, cell, args.seeds, args.folder, progress, found)
        except KeyboardInterrupt:
            console.print("stopped: what is done follows", style="yellow")
            code = 130
        except (ChildDied, TargetError, OSError, RuntimeError, TimeoutError, ValueError,
                subprocess.SubprocessError) as exc:  # fmt: skip
            console.print(str(exc), style="red", markup=False)
            code = 1
    if league.runs:
        print(report(league.runs))
    for each in league.runs[num_earlier:]:
        span_s = each.cell.warm_up_s + each.cell.seconds
        if (each.wasted_s or 0.0) > _MOST_WASTED * span_s:
            console.print(
                f"{each.router}, seed {each.seed}: for {each.wasted_s:g} of {span_s:g} s a prompt "
                "waited for room while an idle replica had free blocks for it",
                style="red",
            )
            code = code or 1
    return code


def run_all(
    routers: Sequence[Router],
    cell: Cell,
    seeds: Sequence[int],
    folder: Path,
    progress: Progress,
    found: Callable[[LeagueRun], None],
) -> None:
    """Run every router with every seed, in alternating order; the unlimited ones last.

    Raises:
        ChildDied, TargetError, OSError, RuntimeError, TimeoutError, SubprocessError: a process did
            not start, or a router could not be installed.
        ValueError: another router cannot be simulated.
    """
    task = progress.add_task("starts", total=len(routers) * len(seeds))
    if cell.engines == "simulated":
        for seed in seeds:
            for router in routers:
                progress.update(task, description=f"{router.name}, seed {seed}")
                found(simulated(router, cell, seed))
                progress.advance(task)
        return
    for router in routers:
        progress.update(task, description=f"{router.name}: installing")
        router.install(folder)
    with tempfile.TemporaryDirectory(prefix="league-") as logs:
        for is_unlimited in (False, True):
            of_these = [router for router in routers if router.is_unlimited is is_unlimited]
            if not of_these:
                continue
            progress.update(task, description="replicas start")
            with replicas.running(cell, Path(logs), is_unlimited=is_unlimited) as these:
                for round_, seed in enumerate(seeds):
                    for router in of_these if round_ % 2 == 0 else of_these[::-1]:
                        progress.update(task, description=f"{router.name}, seed {seed}")
                        made = asyncio.run(
                            run(router, cell, seed, these, folder=folder, log_dir=Path(logs))
                        )
                        found(replace(made, round=round_))
                        progress.advance(task)


def _interrupt_on_sigterm() -> None:
    """End on SIGTERM as on Ctrl-C, and on Ctrl-C even where it was set to be ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
