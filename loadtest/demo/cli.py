"""`warmroute demo`: plan, run every policy, report; clean up whatever happens.

Exit status: 0 all turns succeeded; 1 some failed, or a process did not start; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import click
import uvloop
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from loadtest.demo import picture
from loadtest.demo.report import make_report, settings, show, write_json
from loadtest.demo.run import Run, run
from loadtest.demo.workload import FULL, SHORT, Plan, Workload, plan
from loadtest.extras import MissingExtra, need
from loadtest.runner.children import ChildDied
from loadtest.runner.display import make_display
from loadtest.runner.stack import Stack
from policies.registry import POLICIES

DEFAULT_POLICIES: Final = ("round_robin", "session_sticky", "kv_aware")
_WIDTH: Final = 100
_STOPPED: Final = 130


class Job(Struct, frozen=True, kw_only=True):
    """What was asked for."""

    workload: Workload
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    keep: bool
    port: int


@click.command()
@click.option("--short", is_flag=True, help="A third of it, in about 30 s: a smoke test for CI.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    help="Directory for the picture, results.json, turns and logs.",
)
@click.option(
    "--policies",
    "names",
    default=",".join(DEFAULT_POLICIES),
    show_default=True,
    metavar="A,B,…",
    help="In this order. Worth adding: least_loaded, session_hash, prefix_hash.",
)
@click.option("--sessions", type=click.IntRange(min=1), help="Number of agents.")
@click.option("--turns", type=click.IntRange(min=1), help="Median number of turns.")
@click.option("--seed", type=int, default=FULL.seed, show_default=True, help="Of the sessions.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Do all of it for so many seeds, from --seed on.",
)
@click.option("--speed", type=click.FloatRange(min=0.1), help="Clock of the modelled GPUs.")
@click.option("--keep", is_flag=True, help="Leave the last policy's router and replicas running.")
@click.option("--port", default=0, show_default=True, help="The router's, with --keep; 0: any.")
def demo(
    short: bool,
    out: Path,
    names: str,
    sessions: int | None,
    turns: int | None,
    seed: int,
    repeat: int,
    speed: float | None,
    keep: bool,
    port: int,
) -> None:
    """See what cache-aware routing does, without a GPU.

    Three emulated replicas, the router, and a fleet of coding agents; the same sessions under one
    policy after the other, from cold caches; then a table and a picture.
    """
    base = SHORT if short else FULL
    job = Job(
        workload=replace(
            base,
            num_sessions=sessions or base.num_sessions,
            num_turns=turns or base.num_turns,
            speed=speed or base.speed,
            seed=seed,
        ),
        policies=parse_policies(names),
        seeds=tuple(range(seed, seed + repeat)),
        out=out,
        keep=keep,
        port=port,
    )
    sys.exit(uvloop.run(_run_until_signalled(job, _console())))


def parse_policies(names: str) -> tuple[str, ...]:
    """Split and check a list of policies.

    Raises:
        click.BadParameter: one is unknown (names the nearest), named twice, or there is none.
    """
    policies = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in policies:
        if name not in POLICIES:
            near = get_close_matches(name, POLICIES, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise click.BadParameter(
                f"unknown policy {name!r}{meant} (known: {', '.join(POLICIES)})",
                param_hint="--policies",
            )
    if not policies or len(set(policies)) < len(policies):
        raise click.BadParameter("name each policy once", param_hint="--policies")
    return policies


async def _run_until_signalled(job: Job, console: Console) -> int:
    """Do the job; the first SIGINT, SIGTERM or SIGHUP ends it in order, others are ignored."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    stopped: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not stopped:
            main.cancel()
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await _run(job, console)
    except asyncio.CancelledError:
        if not stopped:
            raise
        console.print(f"Stopped by {stopped[0].name}; every process has ended.")
        return _STOPPED
    except ChildDied as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


async def _run(job: Job, console: Console) -> int:
    plans = [plan(replace(job.workload, seed=seed)) for seed in job.seeds]
    for line in settings(job.workload, plans[0]):
        console.print(line, highlight=False)
    _ask_for_matplotlib(console)
    console.print()
    rounds = [
        (replace(job.workload, seed=seed), planned, policy)
        for seed, planned in zip(job.seeds, plans, strict=True)
        for policy in job.policies
    ]
    runs: list[Run] = []
    async with AsyncExitStack() as kept:
        with make_display(console, job.policies, len(job.seeds)) as display:
            for number, (workload, planned, policy) in enumerate(rounds, 1):
                async with AsyncExitStack() as ended:
                    holder = kept if job.keep and number == len(rounds) else ended
                    done, stack = await holder.enter_async_context(
                        run(
                            workload,
                            planned,
                            policy,
                            _log_dir(job.out, policy, workload.seed),
                            port=job.port if holder is kept else 0,
                            display=display,
                        )
                    )
                    runs.append(done)
        status = _finish(job, plans, runs, console)
        if job.keep:
            _print_how_to_use(stack, job.policies[-1], console)
            await asyncio.get_running_loop().create_future()  # until a signal cancels it
    return status


def _ask_for_matplotlib(console: Console) -> None:
    """Print before the runs, not after, that there will be no picture."""
    try:
        need("matplotlib")
    except MissingExtra as error:
        console.print(f"There will be no picture: {error}", highlight=False, markup=False)


def _log_dir(out: Path, policy: str, seed: int) -> Path:
    path = out / "logs" / f"{policy}-{seed}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _finish(job: Job, plans: list[Plan], runs: list[Run], console: Console) -> int:
    """Write and show the report; return the exit status."""
    report = make_report(job.workload, job.seeds, plans, runs)
    write_json(report, runs, job.out)
    show(report, console)
    try:
        written = [path.name for path in picture.draw(report, runs, job.out)]
    except MissingExtra as error:
        written = [f"no picture ({error})"]
    files = ", ".join([*written, "results.json", "turns-*.jsonl", "logs/"])
    console.print(f"\n{job.out}/: {files}", highlight=False, markup=False)
    return 1 if report.num_errors else 0


def _print_how_to_use(stack: Stack, policy: str, console: Console) -> None:
    """Print how to use what was kept, and how to end it."""
    url = stack.router_url
    console.print(
        f"""
Kept running: the router ({policy}) and three replicas, caches warm.

    base URL      {url}/v1        model: tiny, any API key
    an agent      OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none  your-agent
    curl          curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
                    -d '{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]}}'
                  (x-warmroute-replica and x-warmroute-cached in the answer say where, and why)
    metrics       {url}/metrics      admin: {stack.admin_url}
    replicas      {" ".join(stack.replica_urls)}

Ctrl-C (or: kill {os.getpid()}) ends all of it.""",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _console() -> Console:
    """Write to standard output, at most 100 columns wide."""
    console = Console()
    return Console(width=min(console.width, _WIDTH) if console.is_terminal else _WIDTH)
