"""What each term of `kv_aware`'s price is worth: the policy without it, beside the whole one.

    python -m loadtest.studies.terms                                         simulated; minutes
    python -m loadtest.studies.terms --trace conversation_trace.jsonl

Sessions and engines of the grid on real engines (`cells`, `draw`), on seeds that nothing is tuned
on; and Mooncake's trace (`conversation`). A term is taken away in what the policy sees, so it is
the very policy that decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.markdown import table
from loadtest.results import Summary
from loadtest.simulator import simulate
from loadtest.studies.cells import WORKING_SETS, Cell, Shared
from loadtest.studies.conversation import LOADS, SETUP
from loadtest.studies.draw import Draw, draw
from loadtest.studies.grid import NUM_TRACE_TURNS
from loadtest.studies.grid_run import GridRun, run_of, setup_of
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.traces import read_workload
from loadtest.workload import Workload
from policies import Decision, Policy, Snapshot, create
from policies.cost import KvAware

SEEDS: Final = (101, 102)
_KINDS: Final[tuple[tuple[Shared, bool], ...]] = (
    ("small", False),
    ("large", False),
    ("small", True),
)
"""Shared prompt, and whether there is a pool."""


class WithoutConversations(KvAware, frozen=True, kw_only=True):
    """Requests are taken to come to all candidates alike, wherever conversations live."""

    def decide(self, snapshot: Snapshot) -> Decision:
        return super().decide(replace(snapshot, num_sessions=()))


class WithoutBusy(KvAware, frozen=True, kw_only=True):
    """Those who wait are taken to make none wait in turn."""

    def decide(self, snapshot: Snapshot) -> Decision:
        replicas = tuple([replace(each, busy_ratio=0.0) for each in snapshot.replicas])
        return super().decide(replace(snapshot, replicas=replicas))


class WithoutMargin(KvAware, frozen=True, kw_only=True):
    """What a read from the pool may be mispredicted by does not count."""

    def decide(self, snapshot: Snapshot) -> Decision:
        replicas = tuple(
            [
                replace(
                    each, cost=replace(each.cost, fetch_error_ms=0.0, fetched_token_error_ms=0.0)
                )
                for each in snapshot.replicas
            ]
        )
        return super().decide(replace(snapshot, replicas=replicas))


VARIANTS: Final[dict[str, Policy]] = {
    "`kv_aware`": create("kv_aware"),
    "without its price for others (`alpha` 0)": create("kv_aware", {"alpha": 0.0}),
    "without `arrivals` by conversation": WithoutConversations(),
    "without `1 / (1 - busy)`": WithoutBusy(),
    "without the margin of a read": WithoutMargin(),
}


class Ablated(Struct, frozen=True, kw_only=True):
    """One variant in one cell: ratios to the whole policy, in the mean of the seeds."""

    variant: str
    where: str  # the cell, or the trace's load
    recomputed_ratio: float
    ttft_ratio: float


def ablate(
    cells: Sequence[Cell], seeds: Sequence[int], step: Callable[[str], None] = lambda name: None
) -> list[Ablated]:
    """Simulate every variant in every cell."""
    found = []
    for cell in cells:
        draws = [draw(cell, seed) for seed in seeds]
        whole: list[GridRun] = []
        for name, policy in VARIANTS.items():
            step(f"{cell.name}: {name}")
            runs = [_run(drawn, name, policy) for drawn in draws]
            whole = whole or runs
            found.append(
                Ablated(
                    variant=name,
                    where=_name(cell),
                    recomputed_ratio=_ratio(runs, whole, lambda run: run.num_recomputed_tokens),
                    ttft_ratio=_ratio(runs, whole, lambda run: run.ttft_mean_s),
                )
            )
    return found


def ablate_on(
    trace: Workload, loads: Sequence[float], step: Callable[[str], None] = lambda name: None
) -> list[Ablated]:
    """Simulate every variant on a trace at each load."""
    found = []
    for load in loads:
        whole: Summary | None = None
        for name, policy in VARIANTS.items():
            step(f"trace, load {load:g}: {name}")
            run = simulate(trace, policy, replace(SETUP, load=load), label=name).summary
            whole = whole or run
            found.append(
                Ablated(
                    variant=name,
                    where=f"trace, load {load:g}",
                    recomputed_ratio=run.num_recomputed_tokens / whole.num_recomputed_tokens,
                    ttft_ratio=run.ttft_mean_s / whole.ttft_mean_s,
                )
            )
    return found


def report(found: Sequence[Ablated]) -> str:
    """Lay ratios out: a row for each cell, a column for each variant but the whole policy."""
    names = list(VARIANTS)[1:]
    rows = []
    for where in dict.fromkeys(each.where for each in found):
        ours = {each.variant: each for each in found if each.where == where}
        cells = [f"{ours[n].recomputed_ratio:.2f}, {ours[n].ttft_ratio:.2f}" for n in names]
        rows.append([where, *cells])
    return table(["working set, shared prompt", *names], rows)


def _name(cell: Cell) -> str:
    return f"{cell.working_set:g}, {cell.shared}{', pool' if cell.has_pool else ''}"


def _run(drawn: Draw, name: str, policy: Policy) -> GridRun:
    turns = simulate(drawn.workload, policy, setup_of(drawn), label=name).run.turns
    return run_of(drawn, name, turns, kind="simulated", num_exact=0)


def _ratio(
    runs: Sequence[GridRun], whole: Sequence[GridRun], value: Callable[[GridRun], float]
) -> float:
    return fmean([value(one) / value(all_) for one, all_ in zip(runs, whole, strict=True)])


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print the table; after Ctrl-C of what is done."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.terms", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument(
        "--working-set", nargs="+", type=float, default=WORKING_SETS, help="over the caches"
    )
    asked.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    asked.add_argument("--trace", type=Path, help="Mooncake's conversation trace, as well")
    args = asked.parse_args(argv)
    if min(args.working_set) <= 0.0:
        asked.error(f"--working-set {min(args.working_set):g}: must be above 0")
    cells = [
        Cell(working_set=size, shared=shared, has_pool=has_pool)
        for (shared, has_pool), size in product(_KINDS, args.working_set)
    ]
    trace: Workload | None = None
    try:
        if args.trace is not None:
            trace = read_workload(args.trace, max_requests=NUM_TRACE_TURNS)
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    found: list[Ablated] = []

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        num_rows = len(cells) + (len(LOADS) if trace is not None else 0)
        task = progress.add_task("", total=num_rows * len(VARIANTS))

        def step(name: str) -> None:
            progress.update(task, description=name, advance=1)

        for cell in cells:
            found.extend(ablate([cell], args.seeds, step))
        if trace is not None:
            found.extend(ablate_on(trace, LOADS, step))

    code = measured(measure, Console(stderr=True))
    if found:
        print(report(found))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
