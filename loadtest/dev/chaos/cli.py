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

from loadtest.dev.chaos import report
from loadtest.dev.chaos.run import Options, run
from loadtest.dev.chaos.verdict import Evidence, judge

_INTERRUPTED: Final = 130
_WIDTH: Final = 120


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long.")
@click.option("--seed", default=7, show_default=True, help="Of faults and requests.")
@click.option("--agents", default=16, show_default=True, help="Agents at work at once.")
@click.option("--every", default=2.0, show_default=True, help="Seconds between faults, on average.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("chaos-out"),
    show_default=True,
    help="Directory for the verdict and all logs; what an earlier run left there is removed.",
)
def main(minutes: float, seed: int, agents: int, every: float, out: Path) -> None:
    """Break everything at once, for minutes, and check that no answer is lost."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    folder = out.resolve()
    if folder.joinpath("redis.log").exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(
        seed=seed,
        length_s=minutes * 60,
        num_agents=agents,
        every_s=every,
        folder=folder,
    )
    try:
        evidence = uvloop.run(_run(options, console))
    except* RuntimeError as errors:
        raise click.ClickException(str(errors.exceptions[0])) from errors
    checks = judge(evidence)
    asked = f"--minutes {minutes:g} --seed {seed} --agents {agents} --every {every:g}"
    command = f"make chaos ARGS='{asked}'"
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    report.show(console, checks, evidence, command)
    report.write(folder, checks, evidence, command, machine)
    console.print(f"{folder}/verdict.json and the logs", style="dim", markup=False)
    if any(check.holds is False for check in checks):
        sys.exit(1)
    if evidence.is_partial:
        sys.exit(_INTERRUPTED)


async def _run(options: Options, console: Console) -> Evidence:
    """Run; Ctrl-C ends it in order."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with console.status(f"everything breaks for {options.length_s / 60:g} minutes"):
        return await run(options, stop)
