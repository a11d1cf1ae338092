"""What simulations found, laid out for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadtest.simulator.outcome import Simulated

SCHEMA = "warmroute.simulated/1"


def title_of(simulated: Simulated) -> str:
    """Describe in one line what was simulated."""
    setup = simulated.setup
    num_turns = len(simulated.run.turns)
    pool = "no pool" if setup.pool is None else f"pool {setup.pool.speed:g}x"
    load = "own pace" if setup.load is None else f"load {setup.load:g}"
    return (
        f"{simulated.run.info.workload}: {num_turns:,} turns, {setup.loop} loop, {load}; "
        f"{setup.num_replicas} replicas ({setup.engine}), {pool}"
    )


def tables_of(results: Sequence[Simulated]) -> tuple[Table, Table]:
    """Lay results out, one row each: times (s, those between tokens ms), and what was computed.

    Two tables, so that both fit into 80 columns.
    """
    setup = results[0].setup
    times = _table(
        ("mean s", "P50", "P90", "P99", "TBT ms", "good %", "good/s"),
        title=title_of(results[0]),
        caption=f"good: TTFT within {setup.slo_ttft_s:g} s and the longest tenth of a turn's times "
        f"between tokens within {1000 * setup.slo_tbt_s:g} ms in the mean",
    )
    shares = _table(
        ("cache %", "pool %", "computed %", "busy %", "max/mean"),
        title="Where the prompts' tokens came from, and how even the work was",
        caption="max/mean: the busiest replica's work over the mean's",
    )
    for simulated in results:
        summary = simulated.summary
        ttfts_s = (
            summary.ttft_mean_s,
            summary.ttft_p50_s,
            summary.ttft_p90_s,
            summary.ttft_p99_s,
        )
        times.add_row(
            simulated.run.info.label,
            *(f"{value:,.2f}" for value in ttfts_s),
            f"{1000 * simulated.tbt_mean_s:.1f}",
            f"{100 * simulated.good_ratio:.1f}",
            f"{simulated.goodput:.2f}",
        )
        computed = 1.0 - simulated.local_ratio - simulated.pool_ratio
        parts = (simulated.local_ratio, simulated.pool_ratio, computed, simulated.busy_ratio)
        shares.add_row(
            simulated.run.info.label,
            *(f"{100 * value:.1f}" for value in parts),
            f"{simulated.imbalance:.2f}",
        )
    return times, shares


def _table(columns: Sequence[str], *, title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def as_json(results: Sequence[Simulated]) -> bytes:
    """Write results down without their turns: one object, by policy in the order simulated."""
    first = results[0]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "workload": first.run.info.workload,
        "setup": first.setup,
        "stretch": first.stretch,
        "results": [_result(simulated) for simulated in results],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _result(simulated: Simulated) -> dict[str, Any]:
    return {
        "label": simulated.run.info.label,
        "summary": simulated.summary,
        "tbt_mean_s": simulated.tbt_mean_s,
        "tbt_tail_p90_s": simulated.tbt_tail_p90_s,
        "num_good": simulated.num_good,
        "goodput": simulated.goodput,
        "local_ratio": simulated.local_ratio,
        "pool_ratio": simulated.pool_ratio,
        "busy_ratio": simulated.busy_ratio,
        "imbalance": simulated.imbalance,
        "num_mispredicted": simulated.num_mispredicted,
        "num_pool_stored": simulated.num_pool_stored,
        "num_pool_evicted": simulated.num_pool_evicted,
        "span_s": simulated.span_s,
        "replicas": simulated.replicas,
    }
