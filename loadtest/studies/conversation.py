"""Every policy, the weights of `kv_aware` and several routers, on Mooncake's conversation trace.

Simulated, as prefill instances: every reply is one token. Its beginning on small caches, as in
`loadtest.studies.grid`: pressure as with all of it on large ones. The tables of docs/research:
`python -m loadtest.docs --trace FILE --only conversation --only routers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from loadtest.markdown import table
from loadtest.simulator import Setup, Simulated, simulate
from loadtest.studies.grid import NUM_TRACE_BLOCKS
from loadtest.workload import Workload
from policies import POLICIES, Policy, create
from policies.cost import KvAware, MinTtft

LOADS = (0.3, 0.9, 1.15)
WEIGHTS = (0, 1, 2, 4, 8)  # alpha
ROUTERS = (
    ("one router", 1, 0.0),
    ("two, at once", 2, 0.0),
    ("two, 5 ms later", 2, 0.005),
    ("two, 20 ms later", 2, 0.02),
    ("two, 100 ms later", 2, 0.1),
    ("two, 1 s later", 2, 1.0),
    ("two, each its own ledger", 2, math.inf),
    ("four, 5 ms later", 4, 0.005),
    ("four, each its own ledger", 4, math.inf),
)
"""Label, number of routers, how late each learns of the others' requests in seconds."""

SETUP = Setup(num_blocks=NUM_TRACE_BLOCKS, decodes=False)
_CELLS = (
    "In each cell: mean and 90th percentile of the time to first token in seconds; share of prompt "
    "tokens found in the replica's own cache."
)


def policies_report(workload: Workload, setup: Setup = SETUP) -> str:
    """Compare all policies, and weights of `kv_aware`, as Markdown; minutes."""
    weighed = {f"alpha {alpha}": KvAware(alpha=alpha) for alpha in WEIGHTS}
    found = [[_run(workload, create(name), setup, load) for load in LOADS] for name in POLICIES]
    return "\n\n".join(
        [
            f"{len(workload.turns):,} requests of `{workload.name}`, {setup.num_replicas} replicas "
            f"of {setup.cache_blocks(workload.block_size):,} blocks of {workload.block_size} "
            f"tokens, no pool. {_CELLS}",
            _table("policy", [f"`{name}`" for name in POLICIES], found),
            _verdict(dict(zip(POLICIES, found, strict=True))),
            "The weights of `kv_aware`, same setting:",
            _table(
                "weights",
                list(weighed),
                [[_run(workload, p, setup, load) for load in LOADS] for p in weighed.values()],
            ),
        ]
    )


def routers_report(workload: Workload, setup: Setup = SETUP) -> str:
    """Compare several routers with one, by how late they learn of one another; minutes."""
    found = [
        [
            _run(workload, create(KvAware.name), setup, load, num_routers=num, note_lag_s=lag_s)
            for load in LOADS
        ]
        for _, num, lag_s in ROUTERS
    ]
    return "\n\n".join(
        [
            f"{len(workload.turns):,} requests of `{workload.name}`, spread over the 3 s that it "
            f"rounds to, {setup.num_replicas} replicas, `kv_aware`; each request comes to a router "
            f"by chance. {_CELLS}",
            _table(
                "routers, and when they learn of one another", [name for name, *_ in ROUTERS], found
            ),
        ]
    )


def _run(
    workload: Workload, policy: Policy, setup: Setup, load: float, **changes: float
) -> Simulated:
    return simulate(workload, policy, replace(setup, load=load, **changes))


def _verdict(found: dict[str, list[Simulated]]) -> str:
    """Write in one sentence what the default gains over the greedy rule, load by load."""
    changes = [
        f"{ours.summary.ttft_mean_s / greedy.summary.ttft_mean_s - 1:+.0%} at load {load:g}"
        for load, ours, greedy in zip(LOADS, found[KvAware.name], found[MinTtft.name], strict=True)
    ]
    return f"Mean of `kv_aware` against `min_ttft`: {', '.join(changes)}."


def _table(what: str, names: Sequence[str], found: Sequence[Sequence[Simulated]]) -> str:
    header = [what, *(f"load {load:g}" for load in LOADS)]
    rows = [[name, *map(_cell, row)] for name, row in zip(names, found, strict=True)]
    return table(header, rows)


def _cell(found: Simulated) -> str:
    summary = found.summary
    times = f"{_seconds(summary.ttft_mean_s)}, {_seconds(summary.ttft_p90_s)}"
    return f"{times}; {found.local_ratio:.0%}"


def _seconds(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
