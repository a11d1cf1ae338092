"""Sessions beyond what the caches hold: who keeps the fleet's output, and every engine's cache?

Two public reports are behind it. In one, P99 of TTFT is 500 to 580 s at half of the KV limit
(smg#2378). In the other, a hash of the session keeps one engine saturated: its hits fall from 98 to
5 %, while three engines have nothing to do (prime-rl#3255).

A load is the mean context of all sessions that are alive, over what all caches hold. Sessions that
follow one another keep it up; a batch starts at once and ends when its last session does.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import httpx
from msgspec import Struct
from msgspec.structs import replace
from rich.progress import Progress

from loadtest.agents import MARKUP_TOKENS, Profile, Session, plan_session
from loadtest.dev.peers.contestants import Contestant
from loadtest.dev.peers.front import in_front
from loadtest.dev.studies import pair
from loadtest.dev.studies.cells import BLOCK_SIZE, NUM_BLOCKS, NUM_USABLE_BLOCKS, Cell
from loadtest.dev.studies.draw import RAMP_S, session_of
from loadtest.dev.studies.grid_run import DEFAULT, WITHOUT_QUEUE, fleet, under
from loadtest.dev.studies.pair import SESSION_HEADER
from loadtest.engines.process import read_metric
from loadtest.engines.vllm import Engine
from loadtest.generated.agents import agent_sessions
from loadtest.markdown import table
from loadtest.results import TurnResult, percentile
from loadtest.runner.sessions import drive
from loadtest.runner.stack import start_replicas
from loadtest.simulator import simulate

Engines = Literal["simulated", "emulated", "real"]

NUM_EMULATED: Final = 4  # and simulated
NUM_TURNS: Final = 10  # of a session, in the median: a run has to see whole lives
SEED: Final = 401  # nothing was tuned on it, nor on those of simulations
SEEDS: Final = (401, 402, 403)
SIMULATED: Final = (DEFAULT, WITHOUT_QUEUE, "session_sticky", "session_hash")
TIMEOUT_S: Final = 120.0  # of silence: then a client gives up
LONGEST_S: Final = 240.0  # of a run; what is under way then is not counted
_NUM_LIVES: Final = 3  # sessions, one after the other, in the place of each that is alive
_EMULATED: Final = (
    "--preset", "cpu-slow", "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks", str(NUM_BLOCKS),
    "--max-num-batched-tokens", "2048", "--max-num-seqs", "128",
)  # fmt: skip


class Load(Struct, frozen=True, kw_only=True):
    """How much is alive, over all caches, and whether sessions follow those that end."""

    pressure: float
    is_batch: bool = False

    @property
    def name(self) -> str:
        """Name it as tables and options do."""
        return f"{self.pressure:g}{'-batch' if self.is_batch else ''}"


LOADS: Final = (
    *(Load(pressure=pressure) for pressure in (0.5, 1.0, 2.0)),
    *(Load(pressure=pressure, is_batch=True) for pressure in (1.0, 2.0)),
)


class CollapseRun(Struct, frozen=True, kw_only=True):
    """One router under one load.

    Turns and tokens are counted while all are alive, of a batch until its end. Of the engines,
    `hits` are shares of prompt tokens that were cached, `worst_hits` those of the engine with the
    lowest; `busiest` is the most that one computed, over the mean. Times in seconds.
    """

    router: str  # simulated: a policy
    engines: Engines
    load: Load
    seed: int = SEED
    num_sessions: int  # alive at once
    num_turns: int
    num_errors: int
    turns_per_s: float
    output_per_s: float  # tokens
    hits: float
    worst_hits: float
    busiest: float
    ttft_mean_s: float
    ttft_p99_s: float
    longest_wait_s: float


class Counted(Struct, frozen=True, kw_only=True):
    """What an engine counted: prompt tokens, and how many of them were cached."""

    num_prompt_tokens: float
    num_cached_tokens: float


def num_alive(load: Load, num_engines: int, profile: Profile) -> int:
    """Return how many sessions make a load."""
    room = num_engines * NUM_USABLE_BLOCKS * BLOCK_SIZE
    return max(1, round(load.pressure * room / mean_context(profile)))


def mean_context(profile: Profile, num_sessions: int = 50) -> float:
    """Return the mean of a session's own tokens over its turns."""
    contexts = []
    for index in range(num_sessions):
        num_tokens = 0
        for plan in plan_session(profile, index):
            num_tokens += plan.num_input_tokens + plan.num_output_tokens + MARKUP_TOKENS
            contexts.append(num_tokens)
    return fmean(contexts)


def sessions_of(load: Load, num_sessions: int, profile: Profile) -> list[Session]:
    """Make the sessions of a run; the first ones start spread over some seconds."""
    made = []
    for index in range(num_sessions * (1 if load.is_batch else _NUM_LIVES)):
        first, *others = plan_session(profile, index)
        start_s = RAMP_S * index / num_sessions if index < num_sessions else 0.0
        made.append(session_of(profile, index, (replace(first, wait_s=start_s), *others)))
    return made


def profile_of(seed: int = SEED) -> Profile:
    """Describe the sessions, as those of the grid."""
    return Cell(working_set=1.0, prefill="slow", num_turns=NUM_TURNS).profile(seed)


def run_all(
    contestants: Sequence[Contestant],
    loads: Sequence[Load],
    folder: Path,
    progress: Progress,
    found: Callable[[CollapseRun], None],
    *,
    engines: Engines,
    longest_s: float = LONGEST_S,
) -> None:
    """Run every router under every load; a run takes up to `longest_s`.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
    """
    runs = list(product(loads, contestants))
    task = progress.add_task("engines start", total=len(runs))
    with tempfile.TemporaryDirectory(prefix="collapse-") as name, ExitStack() as stack:
        log_dir = Path(name)
        real = () if engines == "emulated" else stack.enter_context(_real(log_dir))
        for load, contestant in runs:
            progress.update(task, description=f"{load.name}: {contestant.name}")
            for engine in real:
                engine.reset_prefix_cache()
            urls = [engine.url for engine in real]
            found(asyncio.run(_run(contestant, urls, load, folder, log_dir, longest_s)))
            progress.advance(task)


def simulate_all(
    loads: Sequence[Load], progress: Progress, found: Callable[[CollapseRun], None]
) -> None:
    """Simulate `SIMULATED` under every load with every seed; minutes."""
    runs = list(product(loads, SIMULATED, SEEDS))
    task = progress.add_task("simulating", total=len(runs))
    for load, label, seed in runs:
        progress.update(task, description=f"{load.name}, {seed}: {label}")
        found(simulated(label, load, seed))
        progress.advance(task)


def simulated(label: str, load: Load, seed: int, num_engines: int = NUM_EMULATED) -> CollapseRun:
    """Simulate one load under a policy. A client has given up where a first token is too late.

    Raises:
        ValueError: `label` names no variant.
    """
    profile = profile_of(seed)
    num_sessions = num_alive(load, num_engines, profile)
    num_all = num_sessions * (1 if load.is_batch else _NUM_LIVES)
    starts = iter([RAMP_S * index / num_sessions for index in range(num_all)])
    script = agent_sessions(replace(profile, num_sessions=num_all), BLOCK_SIZE, starts)
    policy, setup = under(label, fleet(num_engines, NUM_USABLE_BLOCKS, seed, "slow"))
    found = simulate(
        script.workload(load.name), policy, replace(setup, concurrency=num_sessions), label=label
    )
    turns = [
        replace(turn, error="timeout") if (turn.ttft_s or 0.0) > TIMEOUT_S else turn
        for turn in found.run.turns
    ]
    counted = {f"r{number + 1}": [0, 0] for number in range(num_engines)}
    for turn in found.run.turns:
        of_it = counted.setdefault(str(turn.replica), [0, 0])
        of_it[0] += turn.num_prompt_tokens or 0
        of_it[1] += turn.num_cached_tokens or 0
    of_engines = [
        Counted(num_prompt_tokens=prompt, num_cached_tokens=cached)
        for prompt, cached in counted.values()
    ]
    return run_of(label, "simulated", load, num_sessions, turns, of_engines, seed)


@contextmanager
def _real(log_dir: Path) -> Iterator[Sequence[Engine]]:
    with pair.running(log_dir, has_pool=False, prefill="slow") as both:
        yield both.engines


async def _run(
    contestant: Contestant,
    real_urls: Sequence[str],
    load: Load,
    folder: Path,
    log_dir: Path,
    longest_s: float,
) -> CollapseRun:
    """Measure before real engines, or before emulated ones of this run's own."""
    if real_urls:
        return await measure(contestant, real_urls, load, folder, log_dir, "real", longest_s)
    async with start_replicas(_EMULATED, NUM_EMULATED, log_dir) as replicas:
        urls = [replica.announced[1] for replica in replicas]
        return await measure(contestant, urls, load, folder, log_dir, "emulated", longest_s)


async def measure(
    contestant: Contestant,
    urls: Sequence[str],
    load: Load,
    folder: Path,
    log_dir: Path,
    engines: Engines,
    longest_s: float = LONGEST_S,
) -> CollapseRun:
    """Send a load through a fresh router to engines with cold caches.

    Raises:
        ChildDied: the router did not start.
        RuntimeError: no turn succeeded.
    """
    profile = profile_of()
    num_sessions = num_alive(load, len(urls), profile)
    turns: list[TurnResult] = []
    async with (
        in_front(contestant, urls, folder, log_dir) as front,
        httpx.AsyncClient(timeout=30.0, trust_env=False) as client,
    ):
        before = [await _counted(client, url) for url in urls]
        try:
            async with asyncio.timeout(longest_s):
                await drive(
                    front.url,
                    sessions_of(load, num_sessions, profile),
                    concurrency=num_sessions,
                    session_header=SESSION_HEADER,
                    scripted=True,
                    timeout_s=TIMEOUT_S,
                    on_result=turns.append,
                )
        except TimeoutError:
            pass  # what is done counts
        after = [await _counted(client, url) for url in urls]
    counted = [
        Counted(
            num_prompt_tokens=new.num_prompt_tokens - old.num_prompt_tokens,
            num_cached_tokens=new.num_cached_tokens - old.num_cached_tokens,
        )
        for old, new in zip(before, after, strict=True)
    ]
    return run_of(contestant.name, engines, load, num_sessions, turns, counted)


async def _counted(client: httpx.AsyncClient, url: str) -> Counted:
    text = (await client.get(f"{url}/metrics")).text
    return Counted(
        num_prompt_tokens=read_metric(text, "vllm:prefix_cache_queries_total"),
        num_cached_tokens=read_metric(text, "vllm:prefix_cache_hits_total"),
    )


def run_of(
    router: str,
    engines: Engines,
    load: Load,
    num_sessions: int,
    turns: Sequence[TurnResult],
    counted: Sequence[Counted],
    seed: int = SEED,
) -> CollapseRun:
    """Sum a run up.

    Raises:
        RuntimeError: no turn succeeded.
    """
    good = [turn for turn in turns if turn.error is None]
    if not good:
        raise RuntimeError(f"{router}, {load.name}: no turn succeeded; {turns[:1]}")
    begin_s, end_s = _window(load, good)
    inside = [turn for turn in good if begin_s <= turn.start_s + turn.total_s <= end_s]
    ttfts_s = sorted(turn.ttft_s or 0.0 for turn in good)
    computed = [each.num_prompt_tokens - each.num_cached_tokens for each in counted]
    num_prompt_tokens = sum(each.num_prompt_tokens for each in counted)
    return CollapseRun(
        router=router,
        engines=engines,
        load=load,
        seed=seed,
        num_sessions=num_sessions,
        num_turns=len(good),
        num_errors=len(turns) - len(good),
        turns_per_s=len(inside) / (end_s - begin_s),
        output_per_s=sum(turn.num_output_tokens or 0 for turn in inside) / (end_s - begin_s),
        hits=1.0 - sum(computed) / num_prompt_tokens if num_prompt_tokens else 0.0,
        worst_hits=min(
            (each.num_cached_tokens / each.num_prompt_tokens if each.num_prompt_tokens else 1.0)
            for each in counted
        ),
        busiest=max(computed) / fmean(computed) if any(computed) else 1.0,
        ttft_mean_s=fmean(ttfts_s),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        longest_wait_s=ttfts_s[-1],
    )


def _window(load: Load, turns: Sequence[TurnResult]) -> tuple[float, float]:
    """Return from when to when a run is counted."""
    if load.is_batch:
        return 0.0, max(turn.start_s + turn.total_s for turn in turns)
    starts: dict[str, float] = {}
    for turn in turns:
        starts[turn.session_id] = min(starts.get(turn.session_id, turn.start_s), turn.start_s)
    last_s = max(starts.values())  # until then all are alive
    return min(2 * RAMP_S, last_s / 2), last_s


def lay_out(runs: Sequence[CollapseRun]) -> str:
    """Lay runs out, a table for each kind of engines; of several seeds means, and the worst."""
    titles = {
        "simulated": f"{NUM_EMULATED} simulated engines, seeds {', '.join(map(str, SEEDS))}",
        "emulated": f"{NUM_EMULATED} emulated engines, seed {SEED}",
        "real": f"Two vLLM replicas, seed {SEED}",
    }
    parts = []
    for engines, title in titles.items():
        of_these = [run for run in runs if run.engines == engines]
        if of_these:
            parts += [f"**{title}**", _table(of_these)]
    return "\n\n".join(parts)


def _table(runs: Sequence[CollapseRun]) -> str:
    """Lay runs out, a row for each load and router; the peak is over a router's own loads."""
    header = (
        "load", "router", "failed", "turns/s", "of its peak", "cached", "of the worst engine",
        "busiest engine", "TTFT mean, P99", "longest wait",
    )  # fmt: skip
    rows = []
    for load, router in dict.fromkeys((run.load, run.router) for run in runs):
        ours = [run for run in runs if (run.load, run.router) == (load, router)]
        kin = [r for r in runs if r.router == router and r.load.is_batch == load.is_batch]
        peak = max(_pace([r for r in kin if r.load == each.load]) for each in kin)
        rows.append(
            (
                load.name,
                router if "`" in router else f"`{router}`",
                str(sum(run.num_errors for run in ours)),
                f"{_pace(ours):.1f}",
                f"{_pace(ours) / peak:.0%}" if peak else "",
                f"{fmean(run.hits for run in ours):.0%}",
                f"{min(run.worst_hits for run in ours):.0%}",
                f"{max(run.busiest for run in ours):.2f}",
                f"{fmean(run.ttft_mean_s for run in ours):.2f}, "
                f"{fmean(run.ttft_p99_s for run in ours):.1f} s",
                f"{max(run.longest_wait_s for run in ours):.0f} s",
            )
        )
    return table(header, rows)


def _pace(runs: Sequence[CollapseRun]) -> float:
    return fmean(run.turns_per_s for run in runs)
