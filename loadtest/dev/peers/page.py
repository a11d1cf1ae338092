"""The measured comparison: a JSON file, and the tables that `make docs` makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from loadtest.compare.arms import UNLIMITED
from loadtest.dev.peers import aiperf as agents
from loadtest.dev.peers import collapse as beyond
from loadtest.dev.peers.contestants import CONTESTANTS
from loadtest.dev.peers.cost import IN_FLIGHT, Added, Cost
from loadtest.dev.peers.picture import draw_comparison, slow_prefill
from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.grid_run import DEFAULT, WITHOUT_QUEUE, GridRun, read_study
from loadtest.dev.studies.grid_table import best_table, sum_table
from loadtest.machine import Machine
from loadtest.markdown import table

SCHEMA: Final = "warmroute.peers/1"


class Comparison(Struct, frozen=True, kw_only=True):
    """All that was measured; a part that was not is empty. `loads` is the load average before."""

    schema: str = SCHEMA
    machine: Machine
    date: str  # of the newest part
    costs: tuple[Cost, ...] = ()
    grid: tuple[GridRun, ...] = ()
    loads: dict[str, float] = {}
    aiperf: tuple[agents.AiperfRun, ...] = ()
    collapse: tuple[beyond.CollapseRun, ...] = ()


_ROUTERS: Final = tuple(one.name.replace("`", "") for one in CONTESTANTS)
_BASELINE: Final = "vllm-router sticky_least_loaded"
_NO_RIVALS: Final = (DEFAULT, WITHOUT_QUEUE, UNLIMITED)
_GROUPS: Final[dict[str, Callable[[Cell], bool]]] = {
    "Slow prefill": lambda cell: cell.prefill == "slow" and cell.is_bare,
    "Fast prefill": lambda cell: cell.prefill == "fast" and cell.is_bare,
    "With a CPU tier": lambda cell: cell.tier > 0.0,
    "With a Mooncake pool over TCP": lambda cell: cell.has_pool,
}


def with_costs(found: Comparison, costs: Sequence[Cost]) -> Comparison:
    """Replace older costs of the same routers."""
    names = {cost.name for cost in costs}
    order = [one.name for one in CONTESTANTS]
    kept = [cost for cost in found.costs if cost.name not in names]
    ordered = sorted([*kept, *costs], key=lambda cost: order.index(cost.name))
    return replace(found, costs=tuple(ordered))


def with_aiperf(found: Comparison, run: agents.AiperfRun) -> Comparison:
    """Replace an older run of the same router and seed."""
    kept = [each for each in found.aiperf if (each.router, each.seed) != (run.router, run.seed)]
    return replace(found, aiperf=tuple(sorted([*kept, run], key=lambda each: _place(each.router))))


def with_collapse(found: Comparison, run: beyond.CollapseRun) -> Comparison:
    """Replace an older run of the same router, load and engines."""

    def key(each: beyond.CollapseRun) -> tuple[str, beyond.Load, str, int]:
        return each.engines, each.load, each.router, each.seed

    kept = [each for each in found.collapse if key(each) != key(run)]
    ordered = sorted(
        [*kept, run],
        key=lambda each: (each.engines, beyond.LOADS.index(each.load), _place(each.router)),
    )
    return replace(found, collapse=tuple(ordered))


def _place(router: str) -> int:
    """Return a router's place in tables."""
    order = [*beyond.SIMULATED, *(one.name for one in CONTESTANTS)]
    return order.index(router)


def read(path: Path) -> Comparison:
    """Read an earlier comparison.

    Raises:
        OSError, ValueError: the file cannot be read, or is not a comparison.
    """
    return read_study(path, Comparison, SCHEMA)


def write(found: Comparison, path: Path, picture: Path) -> None:
    """Write the JSON, and the picture of the grid if there are runs for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if slow_prefill(found.grid):
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(draw_comparison(found.grid, _ROUTERS))


def grid_tables(found: Comparison) -> str:
    """Sum the grid up by the cost of prefill and by what is behind the caches; then by cell."""
    runs = found.grid
    parts = []
    for title, is_of_group in _GROUPS.items():
        of_group = [run for run in runs if is_of_group(run.cell)]
        if of_group:
            pace = fmean(run.pace for run in of_group)
            parts += [
                f"### {title}",
                f"A prompt took these engines {pace:.1f} times as long as in the simulator.",
                sum_table(of_group, _BASELINE),
            ]
    others = [arm for arm in dict.fromkeys(run.arm for run in runs) if arm not in _NO_RIVALS]
    if others and any(run.arm == DEFAULT for run in runs):
        parts += [
            "### Cell by cell",
            f"The default, `{DEFAULT}`, over the best of all others in each figure of each cell:",
            best_table(runs, DEFAULT, others),
        ]
    return "\n\n".join(parts)


def cost_table(found: Comparison) -> str:
    """Lay out what a request costs, a row for each router."""
    costs = found.costs
    sizes = [f"{_kb(added)} KB" for added in costs[0].added]
    header = (
        "router", *sizes, f"a turn, {_kb(costs[0].turn)} KB", "CPU of that turn",
        f"requests/s, {IN_FLIGHT} in flight", "CPU each", "memory",
    )  # fmt: skip
    rows = [
        (
            cost.name,
            *[f"{added.p50_ms:.2f} / {added.p99_ms:.2f}" for added in (*cost.added, cost.turn)],
            f"{cost.turn.cpu_ms:.2f} ms",
            f"{cost.requests_per_s:,.0f}",
            f"{cost.loaded_cpu_ms:.2f} ms",
            f"{cost.rss_mib:,.0f} MiB",
        )
        for cost in costs
    ]
    direct = ", ".join(
        f"{min(cost.added[i].direct_p50_ms for cost in costs):.2f}" for i in range(len(sizes))
    )
    return (
        f"{table(header, rows)}\n\nDirect p50: {direct} ms. Load average before: "
        f"{found.loads.get('cost', 0.0):.2f}."
    )


def aiperf_table(found: Comparison) -> str:
    """Lay out what AIPerf measured."""
    return agents.lay_out(found.aiperf)


def collapse_tables(found: Comparison) -> str:
    """Lay out loads beyond the caches."""
    return beyond.lay_out(found.collapse)


def _kb(added: Added) -> str:
    return f"{added.num_bytes / 1000:,.0f}"
