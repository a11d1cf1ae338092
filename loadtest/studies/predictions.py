"""How often the predicted hit is there when an engine comes to the request: by its queue.

    python -m loadtest.studies.predictions

Agents' sessions, more than the caches hold, on simulated replicas: by how many requests may wait in
front of one in its engine (`queue.window`), and by how late a router learns what was evicted. Each
answer is held against two predictions of the same decision. Now: what is there at that moment.
Then: what those in front will have left of it, which is what the router predicts. Equal to the
token, or wrong.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from loadtest.generated import Agents
from loadtest.markdown import table
from loadtest.simulator import Setup, simulate
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.workload import Workload
from policies import create
from router.records.record import DecisionRecord
from router.scheduling.waiting import QueueRules

NUM_REPLICAS: Final = 2
NUM_BLOCKS: Final = 600  # of 512 tokens, of each
NUM_SESSIONS: Final = 96
NUM_TURNS: Final = 6  # median
SEEDS: Final = (1, 2)
WINDOWS: Final[tuple[int | None, ...]] = (0, QueueRules().window, None)
TO_ENGINE_S: Final = 0.005

Advance = Callable[[int], None]


class Lag(Struct, frozen=True):
    """How late a router's knowledge is."""

    name: str
    event_lag_s: float
    to_engine_s: float


LAGS: Final = (
    Lag("events at once", 0.0, 0.0),
    Lag("events 20 ms late", 0.02, TO_ENGINE_S),
    Lag("events 100 ms late", 0.1, TO_ENGINE_S),
)


class PredictionRun(Struct, frozen=True, kw_only=True):
    """One draw under one rule; of `num_turns` answers so many were predicted to the token."""

    window: int | None  # None: requests are sent at once
    lag: str
    seed: int
    num_turns: int
    num_right_now: int
    num_right_then: int
    num_computed_tokens: int  # of prompts
    ttft_mean_s: float
    goodput: float  # turns a second within the simulator's limits


def draw(seed: int) -> Workload:
    """Draw the sessions, all of which start at once."""
    return Agents(
        num_sessions=NUM_SESSIONS, num_turns=NUM_TURNS, rate=math.inf, scale_tokens=0.5, seed=seed
    ).workload()


def run(
    workload: Workload, window: int | None, lag: Lag, seed: int, advance: Advance = lambda num: None
) -> PredictionRun:
    """Simulate one draw; ten seconds."""
    setup = Setup(
        num_replicas=NUM_REPLICAS,
        num_blocks=NUM_BLOCKS,
        load=None,
        loop="closed",
        event_lag_s=lag.event_lag_s,
        to_engine_s=lag.to_engine_s,
        queue=None if window is None else QueueRules(window=window),
        slo_ttft_s=5.0,
        seed=seed,
        keeps_records=True,
    )
    found = simulate(workload, create("kv_aware"), setup, advance=advance)
    return PredictionRun(
        window=window,
        lag=lag.name,
        seed=seed,
        num_turns=len(found.records),
        num_right_now=sum(_num_there(r) == r.num_reported_cached_tokens for r in found.records),
        num_right_then=len(found.records) - found.num_mispredicted,
        num_computed_tokens=found.num_prompt_tokens - found.num_local_tokens,
        ttft_mean_s=found.summary.ttft_mean_s,
        goodput=found.goodput,
    )


def _num_there(record: DecisionRecord) -> int:
    """Count what the chosen candidate could reuse at the moment of the decision."""
    assert record.snapshot is not None
    assert record.decision is not None
    chosen = record.decision.candidate
    return next(view.num_gpu_tokens for view in record.snapshot.replicas if view.id == chosen)


# -- tables --------------------------------------------------------------------------------------


def report(runs: Sequence[PredictionRun]) -> str:
    """Lay the runs out as Markdown: in each cell the share that was right, for each draw."""
    num_turns = {one.seed: one.num_turns for one in runs}
    caption = (
        f"{NUM_SESSIONS} sessions of {NUM_TURNS} turns (median) on {NUM_REPLICAS} replicas of "
        f"{NUM_BLOCKS} blocks of 512 tokens, `kv_aware`, no pool. Share of answers predicted to "
        "the token; turns by draw: "
        f"{', '.join(f'{num:,} (seed {seed})' for seed, num in num_turns.items())}."
    )
    rows = []
    for window in dict.fromkeys(one.window for one in runs):
        of_window = [one for one in runs if one.window == window]
        for name, value in (("now", _now), ("then", _then)):
            cells = [
                ", ".join(f"{value(one):.1%}" for one in of_window if one.lag == lag.name)
                for lag in LAGS
            ]
            rows.append((_label(window), name, *cells))
    return f"{caption}\n\n{table(('`queue.window`', '', *[lag.name for lag in LAGS]), rows)}"


def default_report() -> str:
    """Simulate as the command does, and lay the runs out; minutes."""
    workloads = [(seed, draw(seed)) for seed in SEEDS]
    return report(
        [
            run(workload, window, lag, seed)
            for window, lag, (seed, workload) in product(WINDOWS, LAGS, workloads)
        ]
    )


def _now(one: PredictionRun) -> float:
    return one.num_right_now / max(1, one.num_turns)


def _then(one: PredictionRun) -> float:
    return one.num_right_then / max(1, one.num_turns)


def _label(window: int | None) -> str:
    if window is None:
        return "queue off"
    return f"{window} (default)" if window == QueueRules().window else f"{window}"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the table; after Ctrl-C that of what is done."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.predictions", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="default: 1 2")
    asked.add_argument("--json", type=Path, help="write the runs there, each when it is done")
    args = asked.parse_args(argv)
    if args.json is not None and not args.json.parent.is_dir():
        asked.error(f"--json {args.json}: no such directory: {args.json.parent}")
    seeds = list(dict.fromkeys(args.seeds))
    runs: list[PredictionRun] = []

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        workloads = [(seed, draw(seed)) for seed in seeds]
        total = len(WINDOWS) * len(LAGS) * sum(len(each.turns) for _, each in workloads)
        task = progress.add_task("", total=total)
        for window, lag, (seed, workload) in product(WINDOWS, LAGS, workloads):
            progress.update(task, description=f"{_label(window)}, {lag.name}, seed {seed}")
            runs.append(run(workload, window, lag, seed, lambda num: progress.advance(task, num)))
            if args.json is not None:
                args.json.write_bytes(msgspec.json.encode(runs) + b"\n")

    code = measured(measure, Console(stderr=True))
    if runs:
        print(report(runs))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
