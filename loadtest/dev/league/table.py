"""The table of a league, a row for each router, and the file of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Struct

from loadtest.dev.league.cell import Cell
from loadtest.dev.league.run import LeagueRun
from loadtest.machine import Machine
from loadtest.markdown import table
from loadtest.steady import Steady

SCHEMA: Final = "warmroute.league/1"
HEADER: Final = (
    "router", "output tokens/s", "turns/s", "computed tokens", "cached",
    "TTFT mean", "P50", "P90", "P99", "longest wait", "a session takes", "failed",
    "idle (with room)",
)  # fmt: skip


class League(Struct, frozen=True, kw_only=True):
    """All runs of one command."""

    schema: str = SCHEMA
    machine: Machine
    date: str
    command: str
    load: float  # of the machine when it began, without this command
    runs: tuple[LeagueRun, ...] = ()


def read(path: Path) -> League:
    """Read the runs of earlier commands.

    Raises:
        OSError, ValueError: the file cannot be read, or is none of a league.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=League)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{path}: {exc}") from exc
    if found.schema != SCHEMA:
        raise ValueError(f"{path}: its schema is {found.schema}, not {SCHEMA}")
    return found


def write(league: League, path: Path) -> None:
    """Write all runs."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(league), indent=1) + b"\n")


def report(runs: Sequence[LeagueRun]) -> str:
    """Lay runs out: a table for each cell."""
    cells = list(dict.fromkeys(run.cell for run in runs))
    return "\n\n".join(_of_cell(cell, [run for run in runs if run.cell == cell]) for cell in cells)


def _of_cell(cell: Cell, runs: Sequence[LeagueRun]) -> str:
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    behind = f", a CPU tier of {cell.tier:g} caches" if cell.tier else ""
    behind += ", a pool" if cell.has_pool else ""
    prefill = f"{cell.prefill} prefill" if cell.engines == "real" else cell.preset
    who = {
        "chats": f"chats, {cell.rate:g} a second",
        "mixed": f"{runs[0].num_live} live agents, chats ({cell.rate:g} a second)",
    }.get(cell.kind, f"{runs[0].num_live} live {cell.kind}")
    title = (
        f"**{who}; {cell.num_replicas} {cell.engines} replicas of {cell.num_blocks:,} blocks "
        f"({prefill}){behind}; {cell.seconds:g} s after {cell.warm_up_s:g} s; seeds {seeds}**"
    )
    return f"{title}\n\n{table(HEADER, rows_of(runs))}"


def rows_of(runs: Sequence[LeagueRun]) -> list[tuple[str, ...]]:
    """Lay the runs of one cell out: sums and means over seeds, and the longest wait."""
    rows = []
    for router in dict.fromkeys(run.router for run in runs):
        ours = [run for run in runs if run.router == router]
        all_of = [run.steady for run in ours]

        def mean(figure: Callable[[Steady], float], all_of: Sequence[Steady] = all_of) -> float:
            return fmean(figure(each) for each in all_of)

        idle = [run.idle_s for run in ours if run.idle_s is not None]
        wasted_s = sum(run.wasted_s or 0.0 for run in ours)
        rows.append(
            (
                f"`{router}`",
                f"{mean(lambda s: s.output_per_s):.0f}",
                f"{mean(lambda s: s.turns_per_s):.2f}",
                f"{sum(each.num_computed_tokens for each in all_of) / 1e3:,.0f}k",
                f"{mean(lambda s: s.hits):.1%}",
                *(
                    f"{mean(figure):.2f} s"
                    for figure in (
                        lambda s: s.ttft_mean_s,
                        lambda s: s.ttft_p50_s,
                        lambda s: s.ttft_p90_s,
                        lambda s: s.ttft_p99_s,
                    )
                ),
                f"{max(each.longest_wait_s for each in all_of):.0f} s",
                f"{mean(lambda s: s.session_mean_s):.0f} s "
                f"({sum(each.num_sessions for each in all_of)})",
                str(sum(each.num_errors for each in all_of)),
                f"{sum(idle):.0f} s ({wasted_s:.0f} s)" if idle else "",
            )
        )
    return rows
