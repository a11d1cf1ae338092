"""`python -m loadtest.dev.chaos`: run, judge, report.

Exit status: 0 all holds; 1 something does not; 130 interrupted, and what was seen until then holds.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

import click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.dev.chaos import report
from loadtest.dev.chaos.faults import Injector
from loadtest.dev.chaos.ledger import Ledger
from loadtest.dev.chaos.plan import KINDS
from loadtest.dev.chaos.run import Options, run
from loadtest.dev.chaos.verdict import Evidence, judge

_INTERRUPTED: Final = 130
_WIDTH: Final = 120


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long.")
@click.option("--seed", default=7, show_default=True, help="Of faults and requests.")
@click.option("--agents", default=16, show_default=True, help="Agents at work at once.")
@click.option("--every", default=2.0, show_default=True, help="Seconds between faults, on average.")
@click.option("--only", default="", help="Do only faults whose name has this text in it.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("chaos-out"),
    show_default=True,
    help="Directory for the verdict and all logs; what an earlier run left there is removed.",
)
def main(minutes: float, seed: int, agents: int, every: float, only: str, out: Path) -> None:
    """Break everything at once, for minutes, and check that no answer is lost."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    folder = out.resolve()
    if folder.joinpath("redis.log").exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not any(only in kind.name for kind in KINDS):
        raise click.BadParameter(f"no fault has {only!r} in its name", param_hint="--only")
    options = Options(
        seed=seed,
        length_s=minutes * 60,
        num_agents=agents,
        every_s=every,
        folder=folder,
        only=only,
    )
    try:
        evidence = uvloop.run(_run(options, console))
    except* RuntimeError as errors:
        raise click.ClickException(str(errors.exceptions[0])) from errors
    checks = judge(evidence)
    asked = f"--minutes {minutes:g} --seed {seed} --agents {agents} --every {every:g}"
    asked += f' --only "{only}"' if only else ""
    command = f"make chaos ARGS='{asked}'"
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    report.show(console, checks, evidence, command)
    report.write(folder, checks, evidence, report.markdown(checks, evidence, command, machine))
    console.print(f"{folder}/verdict.json, verdict.md and the logs", style="dim", markup=False)
    if any(check.holds is False for check in checks):
        sys.exit(1)
    if evidence.is_partial:
        sys.exit(_INTERRUPTED)


async def _run(options: Options, console: Console) -> Evidence:
    """Run with a progress bar; Ctrl-C ends it in order."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=options.length_s)

        def show(now_s: float, ledger: Ledger, injector: Injector) -> None:
            failed = sum(ledger.count(name) for name in ("error", "error event", "aborted"))
            bad = sum(ledger.count(name) for name in ("wrong", "unclear"))
            under_way = [d.fault for d in injector.time_line if d.end_s is None]
            what = ", ".join(f"{fault.kind.name} ({fault.target})" for fault in under_way)
            bar.update(
                task,
                completed=now_s,
                description=f"{len(ledger.seen):,} requests, {failed} failed, {bad} wrong or "
                f"unclear, {len(injector.time_line)} faults: {what or 'none now'}",
            )

        return await run(options, stop, show)
