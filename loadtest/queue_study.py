"""The study in docs/policies.md: every policy, and the weights of kv_aware, on one trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from loadtest.queue_model import Result, Setup, rules, run
from loadtest.traces import read_trace, sessions_of, spread
from policies import POLICIES, Policy
from policies.cost import KvAware, MinTtft

LOADS = (0.3, 0.9, 1.15)
WEIGHTS = (  # alpha, beta, gamma
    (0, 0, 0), (1, 0, 0), (2, 0, 0), (4, 0, 0), (8, 0, 0), (0, 4, 0), (2, 4, 0), (2, 0, 1),
    (2, 0, 3), (2, 0, 6), (2, 4, 3),
)  # fmt: skip


def study(trace_file: Path) -> str:
    """Run it and lay it out as Markdown; minutes."""
    trace = read_trace(trace_file)
    sessions = sessions_of(trace)

    def runs(chosen: Sequence[tuple[str, Policy]], load: float) -> list[Result]:
        setup = Setup(load=load)
        return [run(trace, sessions, policy, setup, label=label) for label, policy in chosen]

    policies = [(f"`{name}`", policy) for name, policy in rules(list(POLICIES))]
    weights: list[tuple[str, Policy]] = [
        (
            f"alpha {alpha}, beta {beta}, gamma {gamma}",
            KvAware(alpha=alpha, beta=beta, gamma=gamma, delta=0.0),
        )
        for alpha, beta, gamma in WEIGHTS
    ]
    setup = Setup()
    by_policy = [runs(policies, load) for load in LOADS]
    return "\n\n".join(
        [
            f"{len(trace):,} requests of `{trace_file.name}`, {setup.num_replicas} replicas of "
            f"{setup.num_blocks:,} blocks of 512 tokens, no pool. In each cell: mean and 90th "
            "percentile of the time to first token in seconds; share of prompt tokens found in "
            "the replica's own cache.",
            _layout("policy", by_policy),
            _verdict(by_policy),
            "The weights of `kv_aware`, same setting:",
            _layout("weights", [runs(weights, load) for load in LOADS]),
        ]
    )


ROUTERS = (
    ("one router", 1, 0.0),
    ("two, at once", 2, 0.0),
    ("two, 5 ms later", 2, 5.0),
    ("two, 20 ms later", 2, 20.0),
    ("two, 100 ms later", 2, 100.0),
    ("two, 1 s later", 2, 1000.0),
    ("two, each its own ledger", 2, math.inf),
    ("four, 5 ms later", 4, 5.0),
    ("four, each its own ledger", 4, math.inf),
)
"""Label, number of routers, how late each hears of the others' requests in ms."""


def staleness_study(trace_file: Path) -> str:
    """Compare several routers with one, by how late they hear of one another; minutes."""
    trace = spread(read_trace(trace_file))
    sessions = sessions_of(trace)
    policy = KvAware()
    columns = []
    for load in LOADS:
        column = []
        for label, num_routers, staleness_ms in ROUTERS:
            setup = Setup(load=load, num_routers=num_routers, staleness_ms=staleness_ms)
            column.append(run(trace, sessions, policy, setup, label=label))
        columns.append(column)
    setup = Setup()
    return "\n\n".join(
        [
            f"{len(trace):,} requests of `{trace_file.name}`, spread over the 3 s that it rounds "
            f"to, {setup.num_replicas} replicas, `kv_aware`; each request comes to a router by "
            "chance. In each cell: mean and 90th percentile of the time to first token in "
            "seconds; share of prompt tokens found in the replica's own cache.",
            _layout("routers, and when they hear of one another", columns),
        ]
    )


def _verdict(columns: Sequence[Sequence[Result]]) -> str:
    """Say in one sentence what the default gains over the greedy rule, load by load."""
    changes = []
    for load, column in zip(LOADS, columns, strict=True):
        means = {result.label.strip("`").split()[0]: result.mean_s for result in column}
        change = means[KvAware.name] / means[MinTtft.name] - 1
        changes.append(f"{change:+.0%} at load {load:g}")
    return f"Mean of `kv_aware` against `min_ttft`: {', '.join(changes)}."


def _layout(what: str, columns: Sequence[Sequence[Result]]) -> str:
    """Lay out one row per policy, one column per load."""
    head = [what, *(f"load {load:g}" for load in LOADS)]
    lines = [head, ["---", *("---:" for _ in LOADS)]]
    lines += [
        [row[0].label, *(_cell(result) for result in row)] for row in zip(*columns, strict=True)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(r: Result) -> str:
    return f"{_seconds(r.mean_s)}, {_seconds(r.p90_s)}; {r.local_ratio:.0%}"


def _seconds(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
