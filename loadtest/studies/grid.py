"""Where the default policy stands: `kv_aware` against every other, on a grid of settings.

    python -m loadtest.studies.grid --trace conversation_trace.jsonl [--only agents] [--json FILE]

Four workloads, three loads, no pool and two pools. A cell is the mean TTFT of `kv_aware` over that
of the best other policy, whichever that is there; `*` marks where it is worse by more than 3 %.
The loads are of work without any cache (`loadtest.simulator.Setup`): where nearly all is cached, as
with agents, the fleet has little to do at any of them. Generated workloads are drawn several
times, and means are taken over all draws: one draw's best policy is partly luck.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.generated import Agents, Shared, Siblings
from loadtest.markdown import table
from loadtest.simulator import PoolSetup, Setup, simulate
from loadtest.traces import read_workload
from loadtest.workload import Workload
from policies import POLICIES, create
from policies.cost import KvAware

LOADS = (0.6, 0.9, 1.15)
POOLS = (None, 5.0, 20.0)
SEEDS = (0, 1)
MARGIN = 1.03

NUM_TRACE_TURNS = 4_000
NUM_TRACE_BLOCKS = 2_000
"""The trace's beginning, a third, and a third of the cache: pressure as with all of both."""
NUM_BLOCKS = 1_000  # 512,000 tokens: what a 70B model leaves of four H100

Advance = Callable[[int], None]


class Case(Struct, frozen=True, kw_only=True):
    """One workload of the grid, drawn once or several times."""

    name: str
    draws: tuple[Workload, ...]
    num_blocks: int


class Cell(Struct, frozen=True, kw_only=True):
    """Mean TTFT in seconds by policy, over all draws, in one setting."""

    case: str
    load: float
    pool: float | None
    mean_s: dict[str, float]

    @property
    def best_other(self) -> str:
        """Name the best policy but `kv_aware`."""
        others = {name: mean for name, mean in self.mean_s.items() if name != KvAware.name}
        return min(others, key=others.__getitem__)

    @property
    def ratio(self) -> float:
        """Mean TTFT of `kv_aware` over that of the best other policy."""
        return self.mean_s[KvAware.name] / self.mean_s[self.best_other]

    @property
    def is_lost(self) -> bool:
        return self.ratio > MARGIN


def generated_cases(seeds: Sequence[int] = SEEDS) -> list[Case]:
    """Draw agent sessions, bursts of siblings, and chats with one system prompt."""
    made = {
        "agents": [Agents(num_sessions=20, seed=seed).workload() for seed in seeds],
        "siblings": [Siblings(num_bursts=100, seed=seed).workload() for seed in seeds],
        "shared": [Shared(num_sessions=250, seed=seed).workload() for seed in seeds],
    }
    return [
        Case(name=name, draws=tuple(draws), num_blocks=NUM_BLOCKS) for name, draws in made.items()
    ]


def trace_case(trace: Path) -> Case:
    """Read the conversation trace.

    Raises:
        WorkloadError: It is not one.
    """
    workload = read_workload(trace, max_requests=NUM_TRACE_TURNS)
    return Case(name="conversation", draws=(workload,), num_blocks=NUM_TRACE_BLOCKS)


def cells_of(case: Case, advance: Advance = lambda num: None) -> list[Cell]:
    """Simulate one workload under every policy in every setting."""
    cells = []
    for pool in POOLS:
        for load in LOADS:
            setup = Setup(
                load=load,
                num_blocks=case.num_blocks,
                pool=None if pool is None else PoolSetup(speed=pool),
            )
            means = {name: mean_s(case, name, setup, advance) for name in POLICIES}
            cells.append(Cell(case=case.name, load=load, pool=pool, mean_s=means))
    return cells


def mean_s(case: Case, policy: str, setup: Setup, advance: Advance) -> float:
    """Simulate every draw; return the mean TTFT over all turns."""
    total_s, num_turns = 0.0, 0
    for seed, workload in enumerate(case.draws):
        found = simulate(workload, create(policy), replace(setup, seed=seed), advance=advance)
        total_s += sum([turn.ttft_s or 0.0 for turn in found.run.turns])
        num_turns += len(found.run.turns)
    return total_s / num_turns


def report(cells: Sequence[Cell]) -> str:
    """Lay the grid out as Markdown, one row for each workload and pool."""
    rows = []
    for case in dict.fromkeys(cell.case for cell in cells):
        for pool in POOLS:
            of_row = [cell for cell in cells if cell.case == case and cell.pool == pool]
            shown = "none" if pool is None else f"{pool:g}x"
            rows.append([case, shown, *(_shown(cell) for cell in of_row)])
    header = ["workload", "pool", *(f"load {load:g}" for load in LOADS)]
    return f"{table(header, rows)}\n\n{verdict(cells)}"


def verdict(cells: Sequence[Cell]) -> str:
    """Describe where `kv_aware` is worse than the best other policy by more than the margin."""
    lost = [cell for cell in cells if cell.is_lost]
    worst = max(cells, key=lambda cell: cell.ratio)
    if not lost:
        return (
            f"Nowhere is `kv_aware` worse than the best other policy by more than 3 %; "
            f"at worst {worst.ratio - 1:+.1%} ({_where(worst)})."
        )
    where = "\n".join(f"- {_where(cell)}: {cell.ratio - 1:+.1%}" for cell in lost)
    return f"Worse by more than 3 % in {len(lost)} of {len(cells)} cells:\n\n{where}"


def _where(cell: Cell) -> str:
    pool = "no pool" if cell.pool is None else f"pool {cell.pool:g}x"
    return f"{cell.case}, {pool}, load {cell.load:g}, against `{cell.best_other}`"


def _shown(cell: Cell) -> str:
    mark = " *" if cell.is_lost else ""
    return f"{cell.ratio:.3f}{mark} `{cell.best_other}` {cell.mean_s[cell.best_other]:.2f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the grid and print it; some ten minutes."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.studies.grid", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trace", type=Path, help="conversation_trace.jsonl; without: not in it")
    parser.add_argument("--only", action="append", help="a workload; repeatable")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=SEEDS, help="draws of the generated workloads"
    )
    parser.add_argument("--json", type=Path, help="write the cells there")
    args = parser.parse_args(argv)
    try:
        cases = [trace_case(args.trace)] if args.trace is not None else []
    except ValueError as exc:
        Console(stderr=True).print(str(exc), style="red", markup=False)
        return 2
    cases += generated_cases(args.seeds)
    known = [case.name for case in cases]
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]}: unknown (allowed: {', '.join(known)})")
    cells = simulated([case for case in cases if not args.only or case.name in args.only])
    print(report(cells))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(cells), indent=1))
    return 0


def simulated(cases: Sequence[Case]) -> list[Cell]:
    """Simulate all cases with a progress bar."""
    num_runs = len(POOLS) * len(LOADS) * len(POLICIES)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        cells = []
        for case in cases:
            total = num_runs * sum(len(workload.turns) for workload in case.draws)
            task = progress.add_task(case.name, total=total)
            cells += cells_of(case, lambda num, task=task: progress.advance(task, num))  # type: ignore[misc]
        return cells


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
