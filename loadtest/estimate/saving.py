"""What the same traffic costs under each kind of routing, simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.simulator import Setup, Simulated, simulate
from loadtest.workload import Workload
from policies import create
from router.config import QueueConfig
from router.scheduling.waiting import QueueRules

WARMROUTE: Final = "warmroute"
ROUTINGS: Final = {
    "round robin": "round_robin",
    "session hash": "session_hash",
    WARMROUTE: "kv_aware",
}
"""What other routers do by default, and warmroute: name to policy."""
MIN_SESSIONS: Final = 20  # of fewer, a single one decides
NO_DIFFERENCE: Final = 0.03  # two simulations of like policies differ by as much


class Traffic(Struct, frozen=True, kw_only=True):
    """What was recorded. `num_new_tokens` would be computed with a cache of any size."""

    num_turns: int
    num_sessions: int
    num_prompt_tokens: int
    num_new_tokens: int
    span_s: float


class Saving(Struct, frozen=True, kw_only=True):
    """One kind of routing.

    `num_recomputed_tokens` were computed though some replica had computed them before;
    `prefill_s` is how long replicas computed prompts, summed over all of them.
    """

    routing: str
    num_computed_tokens: int
    num_recomputed_tokens: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p90_s: float
    prefill_s: float


def traffic_of(workload: Workload) -> Traffic:
    """Count what is new in each prompt: blocks that no earlier prompt had."""
    seen: set[int] = set()
    num_new = 0
    for turn in workload.turns:
        num_known = 0
        for hash_id in turn.hash_ids:
            if hash_id not in seen:
                break
            num_known += 1
        seen.update(turn.hash_ids)
        num_new += max(0, turn.num_input_tokens - num_known * workload.block_size)
    return Traffic(
        num_turns=len(workload.turns),
        num_sessions=len({turn.session_id for turn in workload.turns}),
        num_prompt_tokens=workload.num_input_tokens,
        num_new_tokens=num_new,
        span_s=workload.span_s,
    )


def savings_of(
    workload: Workload, setup: Setup, advance: Callable[[int], None] = lambda num: None
) -> list[Saving]:
    """Simulate the workload under every kind of routing, from cold caches."""
    traffic = traffic_of(workload)
    found = []
    for routing, policy in ROUTINGS.items():
        queue = QueueRules() if QueueConfig().is_on(policy) else None
        fleet = replace(setup, queue=queue)
        run = simulate(workload, create(policy), fleet, label=routing, advance=advance)
        found.append(_saving(routing, run, traffic))
    return found


def less(ours: float, others: float) -> float:
    """Return by which share `ours` is below `others`; negative: it is above."""
    return 1.0 - ours / others if others else 0.0


def _saving(routing: str, run: Simulated, traffic: Traffic) -> Saving:
    num_computed = run.num_prompt_tokens - run.num_local_tokens - run.num_pool_tokens
    summary = run.summary
    return Saving(
        routing=routing,
        num_computed_tokens=num_computed,
        num_recomputed_tokens=max(0, num_computed - traffic.num_new_tokens),
        hit_ratio=run.local_ratio + run.pool_ratio,
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p90_s=summary.ttft_p90_s,
        prefill_s=sum(use.prefill_ratio for use in run.replicas) * run.span_s,
    )
