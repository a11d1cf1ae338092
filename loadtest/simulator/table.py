"""The results of simulations as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadtest.simulator.outcome import Simulated
from loadtest.simulator.setup import Setup

SCHEMA = "warmroute.simulated/1"


def title_of(simulated: Simulated) -> str:
    """Describe in one line what was simulated."""
    setup = simulated.setup
    num_turns = len(simulated.run.turns)
    pool = "no pool" if setup.pool is None else f"pool {setup.pool.speed:g}x"
    if setup.tier is not None:
        pool = f"CPU tier of {setup.tier.num_blocks:,} blocks {setup.tier.speed:g}x"
    load = "own pace" if setup.load is None else f"load {setup.load:g}"
    return (
        f"{simulated.run.info.workload}: {num_turns:,} turns, {setup.loop} loop, {load}; "
        f"{fleet_of(setup)} ({setup.engine}), {pool}"
    )


def fleet_of(setup: Setup) -> str:
    """Describe the replicas: `8 replicas`, `4 prefill and 12 decode replicas`."""
    halves = setup.halves
    if halves is None:
        return f"{setup.num_replicas} replicas"
    whole = f"{setup.num_replicas} whole, " if setup.num_replicas else ""
    return f"{whole}{halves.num_prefill} prefill and {halves.num_decode} decode replicas"


def tables_of(results: Sequence[Simulated]) -> list[Table]:
    """Lay results out, one row each: times, and the sources of tokens.

    A third table has the two halves if replicas have roles. Each table fits into 80 columns.
    """
    setup = results[0].setup
    times = _table(
        ("mean s", "P50", "P90", "P99", "ITL ms", "good %", "good/s"),
        title=title_of(results[0]),
        caption=f"good: TTFT within {setup.slo_ttft_s:g} s and the longest tenth of a turn's "
        f"inter-token latencies within {1000 * setup.slo_tbt_s:g} ms in the mean",
    )
    shares = _table(
        ("cache %", "CPU %" if setup.tier else "pool %", "computed %", "busy %", "max/mean"),
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
            _name(simulated),
            *(f"{value:,.2f}" for value in ttfts_s),
            f"{1000 * simulated.tbt_mean_s:.1f}",
            f"{100 * simulated.good_ratio:.1f}",
            f"{simulated.goodput:.2f}",
        )
        read = simulated.cpu_ratio + simulated.pool_ratio  # a fleet has one of them
        computed = 1.0 - simulated.local_ratio - read
        parts = (simulated.local_ratio, read, computed, simulated.busy_ratio)
        shares.add_row(
            _name(simulated),
            *(f"{100 * value:.1f}" for value in parts),
            f"{simulated.imbalance:.2f}",
        )
    if setup.halves is None:
        return [times, shares]
    return [times, shares, _halves_table(results)]


def _name(simulated: Simulated) -> str:
    info = simulated.run.info
    return info.label if info.round == 1 else f"{info.label}, round {info.round}"


def _halves_table(results: Sequence[Simulated]) -> Table:
    halves = _table(
        ("apart %", "prefill s", "busy %", "max/mean", "decode busy %", "max/mean", "batch"),
        title="The halves",
        caption="apart: prompts that a prefill replica computed; prefill s: queue and prompt there;"
        " busy: a prefill at work, at decode replicas any step; batch: their tokens by step",
    )
    for found in results:
        halves.add_row(
            _name(found),
            f"{100 * found.apart_ratio:.1f}",
            f"{found.prefill_mean_s:,.2f}",
            f"{100 * found.busy_ratio:.1f}",
            f"{found.imbalance:.2f}",
            f"{100 * found.decode_busy_ratio:.1f}",
            f"{found.decode_imbalance:.2f}",
            f"{found.decode_batch:.1f}",
        )
    return halves


def _table(columns: Sequence[str], *, title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def as_json(results: Sequence[Simulated]) -> bytes:
    """Write results without their turns: one object, by policy in the order simulated."""
    first = results[0]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "workload": first.run.info.workload,
        "setup": first.setup,
        "stretch": first.stretch,
        "results": [_result(simulated) for simulated in results],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


_FIGURES: Final = (
    "summary", "tbt_mean_s", "tbt_tail_p90_s", "num_good", "goodput", "local_ratio", "cpu_ratio",
    "pool_ratio",
    "busy_ratio", "imbalance", "num_mispredicted", "num_pool_stored", "num_pool_evicted",
    "apart_ratio", "num_moved_tokens", "prefill_mean_s", "decode_busy_ratio", "decode_imbalance",
    "decode_batch", "span_s", "replicas",
)  # fmt: skip


def _result(simulated: Simulated) -> dict[str, Any]:
    figures = {name: getattr(simulated, name) for name in _FIGURES}
    info = simulated.run.info
    return {"label": info.label, "round": info.round, **figures}
