"""`warmroute demo`: a simulated comparison of three policies, with everything chosen beforehand.

It is a preset of `warmroute compare --simulate`: coding agents on three replicas, in closed loop,
from cold caches. The caches together hold half of what the agents write, so a policy that keeps
copies on several replicas evicts what is needed again.

Exit status: 0 all turns succeeded; 1 some failed, or a process did not start; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import click
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from loadtest import pictures
from loadtest.compare import answer, store
from loadtest.compare.arms import UNLIMITED, Arm, parse_policies, serve_flags
from loadtest.compare.places import Simulated, cache_tokens
from loadtest.compare.report import ArmFigures, Report, make_report, turns_by_arm
from loadtest.compare.setting import Setting, make_order
from loadtest.compare.study import study
from loadtest.extras import MissingExtra
from loadtest.generated import Agents
from loadtest.output_options import output_option
from loadtest.pages import Table, bullets, on_terminal
from loadtest.results import Run
from loadtest.runner.children import ChildDied
from loadtest.runner.display import Display
from loadtest.runner.stack import start_replicas, start_router
from loadtest.runner.stop import Stop
from loadtest.simulator import Setup
from loadtest.words import clock, duration, percent, ratio, thousands
from loadtest.workload import Workload
from router.config import ADMIN_TOKEN_FILE, ADMIN_URL

DEFAULT_POLICIES: Final = "round_robin,session_sticky,kv_aware,unlimited"
NUM_REPLICAS: Final = 3
ENGINE: Final = "h100x4-70b"
_OURS: Final = "kv_aware"
_BLOCK_SIZE: Final = 64
_RATE: Final = 0.4  # sessions started per second
_ROUNDS: Final = 4
_SLO_TTFT_S: Final = 2.0
_WIDTH: Final = 100  # if the width of the screen is unknown
_STOPPED: Final = 130


class Job(Struct, frozen=True, kw_only=True):
    """What was asked for."""

    num_sessions: int
    num_turns: int
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    out: Path
    keep: bool
    opens: bool
    port: int


@click.command()
@click.option(
    "--short",
    is_flag=True,
    help="A few turns: a smoke test for CI, whose verdict says little.",
)
@output_option(
    is_file=False,
    default=Path("demo-out"),
    help="Directory for the picture, the report and the turns.",
)
@click.option(
    "--policies",
    default=DEFAULT_POLICIES,
    show_default=True,
    metavar="A,B,…",
    help="In this order. Worth adding: least_loaded, session_hash, prefix_hash.",
)
@click.option("--sessions", type=click.IntRange(min=1), help="Number of agents.")
@click.option("--turns", type=click.IntRange(min=1), help="Median number of turns.")
@click.option("--seed", default=1, show_default=True, help="Of the sessions.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Do all of it for so many seeds, from --seed on.",
)
@click.option("--keep", is_flag=True, help="Then serve the last policy on emulated replicas.")
@click.option("--open", "opens", is_flag=True, help="Keep, and open the live page in a browser.")
@click.option("--port", default=0, show_default=True, help="The router's, with --keep; 0: any.")
def demo(
    short: bool,
    out: Path,
    policies: str,
    sessions: int | None,
    turns: int | None,
    seed: int,
    repeat: int,
    keep: bool,
    opens: bool,
    port: int,
) -> None:
    """See what cache-aware routing does, without a GPU.

    Three simulated replicas and a fleet of coding agents; the same sessions under each policy,
    from cold caches; then a verdict, a table and a picture. Time is virtual: a busy machine
    changes no figure.
    """
    arms = parse_policies([policies])
    labels = [arm.label for arm in arms]
    if not arms or len(set(labels)) < len(labels):
        raise click.BadParameter("name each policy once", param_hint="--policies")
    job = Job(
        num_sessions=sessions or (14 if short else 24),
        num_turns=turns or (4 if short else 30),
        arms=arms,
        seeds=tuple(range(seed, seed + repeat)),
        out=out,
        keep=keep or opens,
        opens=opens,
        port=port,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    sys.exit(uvloop.run(_run(job, console)))


async def _run(job: Job, console: Console) -> int:
    """Play every seed, then serve if asked to; the first signal ends it."""
    stop = Stop()
    stop.listen()
    status = 0
    try:
        for seed in job.seeds:
            out = job.out if len(job.seeds) == 1 else job.out / f"seed-{seed}"
            report = await _play(job, seed, out, console, stop)
            status = max(status, 0 if report.is_complete and not report.num_errors else 1)
            if stop.reason:
                raise asyncio.CancelledError
        _print_next(console)
        if job.keep:
            await _serve(job, console)
    except asyncio.CancelledError:
        if not stop.reason:
            raise
        console.print(f"The demo was {stop.reason}; every process has ended.", highlight=False)
        return _STOPPED
    except ChildDied as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return status


async def _play(job: Job, seed: int, out: Path, console: Console, stop: Stop) -> Report:
    """Simulate one seed under every policy, show the figures, and write them to `out`."""
    workload = Agents(
        num_sessions=job.num_sessions,
        num_turns=job.num_turns,
        rate=_RATE,
        block_size=_BLOCK_SIZE,
        seed=seed,
    ).workload()
    num_blocks = round(cache_tokens(workload, NUM_REPLICAS) / workload.block_size)
    setting = _setting(job.arms, workload, seed, num_blocks)
    setup = Setup(
        num_replicas=NUM_REPLICAS,
        num_blocks=num_blocks,
        engine=ENGINE,
        load=None,
        loop="closed",
        seed=seed,
    )
    console.print(
        f"{job.num_sessions} coding agents with sub-agents, {len(workload.turns)} turns, seed "
        f"{seed}\n{NUM_REPLICAS} simulated replicas (Llama 3.1 70B on 4 x H100 each), caches of "
        f"{thousands(num_blocks * workload.block_size)} tokens each\n",
        highlight=False,
    )
    store.clear(out)
    store.prepare(out, setting)
    with Display(console, setting.labels, _ROUNDS) as display:
        place = Simulated(workload, setup)
        runs = await study(setting, place, display, lambda run: store.save_run(out, run), stop)
    report = make_report(setting, runs, note=stop.reason)
    if runs:
        _show(report, runs, out, console)
    return report


def _setting(arms: tuple[Arm, ...], workload: Workload, seed: int, num_blocks: int) -> Setting:
    """Describe the comparison; the baseline is the last policy beside `kv_aware`."""
    labels = [arm.label for arm in arms]
    others = [label for label in labels if label not in (_OURS, UNLIMITED)]
    baseline = others[-1] if others else labels[0]
    return Setting(
        place="simulated",
        arms=arms,
        baseline=baseline,
        order=make_order(labels, _ROUNDS, seed),
        workload=workload.name,
        num_turns=len(workload.turns),
        seed=seed,
        slo_ttft_s=_SLO_TTFT_S,
        details={"replicas": NUM_REPLICAS, "engine": ENGINE, "blocks": num_blocks},
    )


def _show(report: Report, runs: list[Run], out: Path, console: Console) -> None:
    """Print the verdict, the table and what limits it; write the report and the picture."""
    console.print()
    console.print(Text(f"{headline(report)}.", style="bold"))
    if sessions := sessions_line(report):
        console.print(Text(f"{sessions}.", style="bold"))
    console.print()
    console.print(on_terminal(_table(report)))
    console.print()
    console.print(
        bullets(
            [
                *answer.caveats(report),
                "Time is virtual: a busy machine changes no figure. Replicas are simulated: a step "
                "takes as long as data sheets say. Router and network take no time.",
            ]
        )
    )
    files = ["report.html", "report.json", "runs/"]
    store.write_report(out, report, runs)
    try:
        picture = pictures.origins(turns_by_arm(report.setting, runs))
    except MissingExtra as error:
        console.print(f"\nThere is no picture: {error}", highlight=False, markup=False)
        picture = None
    if picture is not None:
        (out / "demo.svg").write_bytes(picture)
        files.insert(0, "demo.svg")
    console.print(f"\n{out}/: {', '.join(files)}", highlight=False, markup=False)


def _table(report: Report) -> Table:
    """List the figures of each policy, in at most 100 columns."""
    return Table(
        head=(
            "policy",
            "computed",
            "hit",
            "TTFT",
            "P99",
            "in 2 s",
            "session, min",
            "longest",
            "busiest",
        ),
        rows=tuple(
            (
                arm.label,
                thousands(arm.whole.num_computed_tokens // _ROUNDS),
                ratio(answer.hit_ratio(arm)),
                duration(arm.whole.ttft_mean_s),
                duration(arm.whole.ttft_p99_s),
                ratio(arm.good_share),
                *_session_cells(arm),
                f"{arm.imbalance or 1.0:.2f} ×",
            )
            for arm in report.arms
        ),
        numeric=tuple(range(1, 9)),
    )


def _session_cells(arm: ArmFigures) -> tuple[str, str]:
    times = arm.sessions
    if times is None:
        return "-", "-"
    return clock(times.mean_s), clock(times.longest_s)


def headline(report: Report) -> str:
    """Write the verdict in one sentence: computed tokens against every other policy."""
    totals = {arm.label: arm.whole.num_computed_tokens for arm in report.arms}
    ours = _OURS if _OURS in totals else list(totals)[-1]
    own = totals.pop(ours)
    totals.pop(UNLIMITED, None)
    parts = [
        f"{_difference(own, tokens)} {name}"
        for name, tokens in sorted(totals.items(), key=lambda item: item[1])
        if tokens
    ]
    if not parts:
        return f"{ours} computes {thousands(own // _ROUNDS)} prompt tokens"
    parts[0] = parts[0].replace(" than", " prompt tokens than", 1)
    return f"{ours} computes {' and '.join(parts)}"


def sessions_line(report: Report) -> str:
    """Write what a whole session takes under each policy; "": no session ended."""
    means = {arm.label: arm.sessions.mean_s for arm in report.arms if arm.sessions is not None}
    ours = _OURS if _OURS in means else next(iter(means), "")
    if not ours:
        return ""
    own = means.pop(ours)
    limit = means.pop(UNLIMITED, None)
    parts = [f"{clock(mean_s)} under {name}" for name, mean_s in means.items()]
    if limit is not None:
        parts.append(f"{clock(limit)} if no cache ever evicted")
    return ", ".join([f"A session takes {clock(own)} min", *parts])


def _difference(ours: int, theirs: int) -> str:
    share = ours / theirs - 1
    if abs(share) < 0.005:
        return "no fewer and no more than"
    return f"{percent(abs(share))} {'fewer' if share < 0 else 'more'} than"


async def _serve(job: Job, console: Console) -> None:
    """Run the last policy in front of emulated replicas, in real time, until a signal."""
    logs = job.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    served = next((arm for arm in reversed(job.arms) if not arm.is_unlimited), job.arms[-1])
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(
            start_replicas(["--preset", ENGINE], NUM_REPLICAS, logs)
        )
        urls = [replica.announced[1] for replica in replicas]
        router = await stack.enter_async_context(
            start_router(urls, serve_flags(served), logs, port=job.port)
        )
        url = router.url
        console.print(
            f"""
Serving in real time: the router ({served.label}) and three emulated replicas.

    base URL      {url}/v1        model: tiny, any API key
    an agent      OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none  your-agent
    curl          curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
                    -d '{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]}}'
                  (x-warmroute-replica and x-warmroute-cached in the answer say where, and why)
    live page     {router.page_url}
    status, why   export {ADMIN_URL}={router.admin_url} {ADMIN_TOKEN_FILE}={router.token_file}
                  warmroute status   (also: warmroute tail, why, page)
    metrics       {url}/metrics
    replicas      {" ".join(urls)}

Ctrl-C (or: kill {os.getpid()}) ends all of it.""",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if job.opens and not await asyncio.to_thread(webbrowser.open, router.page_url):
            console.print("No browser can be opened: open the link of the live page yourself.")
        async with asyncio.TaskGroup() as group:  # a process that dies ends the demo
            for child in (*replicas, router.child):
                group.create_task(child.watch(), name=f"watch {child.name}")


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
