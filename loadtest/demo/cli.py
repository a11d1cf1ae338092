"""`warmroute demo`: plan, play every policy side by side, report; clean up whatever happens.

Exit status: 0 all turns succeeded; 1 some failed, or a process did not start; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
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
from loadtest.demo.progress import Board
from loadtest.demo.report import make_report, settings, show, write_json
from loadtest.demo.run import Ended, Run, run
from loadtest.demo.workload import FULL, SHORT, Plan, Workload, plan
from loadtest.extras import MissingExtra, need
from loadtest.runner.children import ChildDied
from policies.registry import POLICIES

DEFAULT_POLICIES: Final = ("round_robin", "session_sticky", "kv_aware")
_SIDE_BY_SIDE: Final = max(2, os.cpu_count() or 1) + 1  # one more fills the gaps
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
@click.option(
    "--short",
    is_flag=True,
    help="A quarter of the turns: a smoke test for CI, too small for a verdict.",
)
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
    keep: bool,
    port: int,
) -> None:
    """See what cache-aware routing does, without a GPU.

    Three emulated replicas, the router, and a fleet of coding agents; the same sessions under each
    policy, from cold caches; then a verdict, a table and a picture. Time is virtual: a busy machine
    changes no figure.
    """
    base = SHORT if short else FULL
    job = Job(
        workload=replace(
            base,
            num_sessions=sessions or base.num_sessions,
            num_turns=turns or base.num_turns,
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
    began_s = time.monotonic()
    plans = [plan(replace(job.workload, seed=seed)) for seed in job.seeds]
    for line in settings(job.workload, plans[0]):
        console.print(line, highlight=False)
    _ask_for_matplotlib(console)
    console.print()
    (job.out / "logs").mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as kept:
        with Board(console) as board:
            runs = await _play_all(job, plans, board, kept)
        status = _finish(job, plans, runs, console)
        console.print(f"\nIt took {time.monotonic() - began_s:.0f} s.", highlight=False)
        _print_next(console)
        if job.keep:
            _print_how_to_use(runs[-1].ended, job.policies[-1], console)
            await asyncio.get_running_loop().create_future()  # until a signal cancels it
    return status


async def _play_all(job: Job, plans: list[Plan], board: Board, kept: AsyncExitStack) -> list[Run]:
    """Play every policy with every seed, some at once; with `keep` the last one goes into `kept`.

    Raises:
        ChildDied: a process ended before its time.
    """
    gate = asyncio.Semaphore(_SIDE_BY_SIDE)
    names = [(planned, seed, policy) for planned, seed in zip(plans, job.seeds, strict=True)
             for policy in job.policies]  # fmt: skip

    async def play(planned: Plan, seed: int, policy: str, *, is_last: bool) -> Run:
        label = policy if len(job.seeds) == 1 else f"{policy} #{seed}"
        async with gate, AsyncExitStack() as ended:
            row = board.add(label, planned.num_turns)
            done = await (kept if job.keep and is_last else ended).enter_async_context(
                run(
                    replace(job.workload, seed=seed),
                    planned,
                    policy,
                    job.out,
                    port=job.port if job.keep and is_last else 0,
                    on_result=row.add,
                )
            )
            row.finish()
            return done

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    play(*name, is_last=name is names[-1]), name=f"{name[2]} {name[1]}"
                )
                for name in names
            ]
    except* ChildDied as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _ask_for_matplotlib(console: Console) -> None:
    """Print before the runs, not after, that there will be no picture."""
    try:
        need("matplotlib")
    except MissingExtra as error:
        console.print(f"There will be no picture: {error}", highlight=False, markup=False)


def _finish(job: Job, plans: list[Plan], runs: list[Run], console: Console) -> int:
    """Write and show the report; return the exit status."""
    report = make_report(job.workload, job.seeds, plans, runs)
    write_json(report, job.out)
    show(report, console)
    try:
        written = [path.name for path in picture.draw(report, job.out)]
    except MissingExtra as error:
        written = [f"no picture ({error})"]
    files = ", ".join([*written, "results.json", "turns-*.jsonl", "logs/"])
    console.print(f"\n{job.out}/: {files}", highlight=False, markup=False)
    return 1 if report.num_errors else 0


def _print_how_to_use(ended: Ended, policy: str, console: Console) -> None:
    """Print how to use what was kept, and how to end it."""
    url = ended.router_url
    console.print(
        f"""
Kept running: the router ({policy}) and three replicas, caches warm, now in real time.

    base URL      {url}/v1        model: tiny, any API key
    an agent      OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none  your-agent
    curl          curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
                    -d '{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]}}'
                  (x-warmroute-replica and x-warmroute-cached in the answer say where, and why)
    metrics       {url}/metrics      admin: {ended.admin_url}
    replicas      {" ".join(ended.replica_urls)}

Ctrl-C (or: kill {os.getpid()}) ends all of it.""",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _print_next(console: Console) -> None:
    """Print how to go on with replicas of one's own."""
    flags = "--replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002"
    console.print(
        f"\nNext, with your own vLLM replicas:\n"
        f"    warmroute check {flags}\n"
        f"    warmroute serve {flags}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _console() -> Console:
    """Write to standard output, at most 100 columns wide."""
    console = Console()
    return Console(width=min(console.width, _WIDTH) if console.is_terminal else _WIDTH)
