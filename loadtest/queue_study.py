"""The study in docs/policies.md: every policy, and the weights of kv_aware, on one trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.queue_model import Result, Setup, read_trace, rules, run, sessions_of
from policies import POLICIES, Policy
from policies.cost import KvAware, MinTtft

LOADS = (0.3, 0.9, 1.15)
WEIGHTS = ((0, 0), (1, 0), (2, 0), (4, 0), (8, 0), (0, 4), (2, 2), (2, 4), (2, 8), (4, 4))


def study(trace_file: Path) -> str:
    """Run it and lay it out as Markdown; minutes."""
    trace = read_trace(trace_file)
    sessions = sessions_of(trace)

    def runs(chosen: Sequence[tuple[str, Policy]], load: float) -> list[Result]:
        setup = Setup(load=load)
        return [run(trace, sessions, policy, setup, label=label) for label, policy in chosen]

    policies = [(f"`{name}`", policy) for name, policy in rules(list(POLICIES))]
    weights: list[tuple[str, Policy]] = [
        (f"alpha {alpha}, beta {beta}", KvAware(alpha=alpha, beta=beta)) for alpha, beta in WEIGHTS
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
