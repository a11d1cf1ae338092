"""Policies that compare milliseconds: what a request waits, and what it makes others wait."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar

from msgspec import Meta

from policies.load import pick
from policies.policy import Policy
from policies.view import CandidateCost, Decision, ReplicaView, Snapshot

TIE_MS = 1.0
TIE_RATIO = 0.01
"""Totals closer than 1 ms or 1 % are equal: no cost model predicts better than that."""

MOST_DELAYED = 0.5
"""The most conversations at a candidate that a prompt delays, as a share: each sends one request
meanwhile, which comes when half of the work is done."""

MAX_BUSY = 0.95
"""Most of a candidate's time that is taken to be busy: beyond, queues grow without bound."""


class MinTtft(Policy, frozen=True, kw_only=True):
    """Choose the soonest first token: the lowest `ttft = queue + fetch + prefill` by the learned
    cost model. The policy is greedy: it ignores what the request costs later ones.
    """

    name: ClassVar[str] = "min_ttft"

    def decide(self, snapshot: Snapshot) -> Decision:
        return cheapest(snapshot, 0.0)


class KvAware(Policy, frozen=True, kw_only=True):
    """Choose the lowest cost to all requests: `ttft + work x min(alpha x arrivals x (queue + work
    / 2) / (1 - busy), conversations / 2)`. The first part is the request's own wait, as in
    `min_ttft`. The second part is the delay for others, each of which waits at most once. Only
    conversations with room there count, because a silent one is not delayed. So a prompt stays at
    its cache until the queue there costs more than computing it again costs all requests. A new
    conversation goes to a replica with fewer of them.
    """

    name: ClassVar[str] = "kv_aware"

    alpha: Annotated[
        float, Meta(ge=0.0, le=100.0, description="Weight of the delay to other requests")
    ] = 4.0

    def decide(self, snapshot: Snapshot) -> Decision:
        return cheapest(snapshot, self.alpha)


def cheapest(snapshot: Snapshot, alpha: float) -> Decision:
    """Choose the lowest total; equal totals go to the longest match, then to the least busy.

    The longest match before the least busy: among equals, moving a conversation away from its
    cache buys nothing and leaves two copies of it. Cold and short prompts match equally
    everywhere, so they spread by requests in flight, then by conversations, then by a draw.
    """
    costs = candidate_costs(snapshot, alpha)
    lowest = min([cost.total_ms for cost in costs])
    bound = lowest + max(TIE_MS, TIE_RATIO * lowest)
    replicas, sessions = snapshot.replicas, snapshot.num_sessions or (0,) * len(costs)
    ranked = [
        (
            cost.num_uncached_tokens,
            cost.num_fetched_tokens,
            replicas[index].num_requests,
            sessions[index],
            index,
        )
        for index, cost in enumerate(costs)
        if cost.total_ms <= bound
    ]
    best = min(ranked)[:4]
    chosen = pick(snapshot, [replicas[r[4]] for r in ranked if r[:4] == best])
    return Decision(candidate=chosen.id, reason=_reason(snapshot, chosen), costs=costs)


def costs_of(decision: Decision, snapshot: Snapshot) -> tuple[CandidateCost, ...]:
    """Return what each candidate costs, whether the policy that decided compares that or not."""
    is_whole = len(decision.costs) == len(snapshot.replicas)
    return decision.costs if is_whole else candidate_costs(snapshot)


def candidate_costs(snapshot: Snapshot, alpha: float = 0.0) -> tuple[CandidateCost, ...]:
    """Price every candidate; shape (num_replicas,), in the snapshot's order.

    The engine fetches whatever its cpu tier or the pool holds, it does not weigh that against
    computing; so the prediction does the same. `CostModel.prefill_ms`, `max` and `min` are written
    out: hundreds of calls would be half of the time of a decision.
    """
    num_tokens = snapshot.request.num_tokens
    arrivals = _arrivals_per_ms(snapshot) if alpha else [0.0] * len(snapshot.replicas)
    num_sessions = snapshot.num_sessions if any(snapshot.num_sessions) else (inf,) * len(arrivals)
    costs: list[CandidateCost] = []
    for replica, arrivals_per_ms, num_there in zip(
        snapshot.replicas, arrivals, num_sessions, strict=True
    ):
        model = replica.cost
        num_gpu = replica.num_gpu_tokens
        num_own = replica.num_cpu_tokens
        if num_own < num_gpu:
            num_own = num_gpu
        num_held = num_own
        num_pool = replica.num_pool_tokens
        if num_pool is not None and num_pool > num_own and replica.reads_pool:
            num_held = num_pool
        num_uncached = num_tokens - num_held
        num_fetched = num_held - num_gpu
        num_decoding = replica.num_requests - replica.num_waiting
        queue_ms = replica.queue_ms + model.ms_per_running * num_decoding
        fetch_ms = others_ms = 0.0
        if num_fetched:
            num_on_disk = replica.num_disk_tokens
            fetch_ms = model.fetch_ms(
                num_fetched, from_pool=num_held > num_own, num_on_disk=num_on_disk
            )
            if num_held > num_own:  # a prompt leaves a cache that has it for more than an error
                others_ms = model.fetch_margin_ms(num_fetched, num_on_disk)
        compute_ms = (
            model.ms_per_token * num_uncached
            + model.ms_per_mtoken2 * num_uncached * (num_held + 0.5 * num_uncached) * 1e-6
        )
        prefill_ms = model.base_ms + compute_ms
        if arrivals_per_ms:
            busy_ratio = replica.busy_ratio if replica.busy_ratio < MAX_BUSY else MAX_BUSY
            num_delayed = arrivals_per_ms * (queue_ms + 0.5 * compute_ms)
            if alpha * num_delayed < MOST_DELAYED * num_there * (1.0 - busy_ratio):
                others_ms += alpha * compute_ms * num_delayed / (1.0 - busy_ratio)
            else:
                others_ms += MOST_DELAYED * num_there * compute_ms
        costs.append(
            CandidateCost(
                id=replica.id,
                num_uncached_tokens=num_uncached,
                num_fetched_tokens=num_fetched,
                queue_ms=queue_ms,
                fetch_ms=fetch_ms,
                prefill_ms=prefill_ms,
                others_ms=others_ms,
                total_ms=queue_ms + fetch_ms + prefill_ms + others_ms,
            )
        )
    return tuple(costs)


def _arrivals_per_ms(snapshot: Snapshot) -> list[float]:
    """Share the fleet's requests out to candidates, by the conversations that live there."""
    num_sessions = snapshot.num_sessions or (0,) * len(snapshot.replicas)
    total = sum(num_sessions)
    if not total:
        return [1e-3 * snapshot.arrivals_per_s / len(num_sessions)] * len(num_sessions)
    of_one = 1e-3 * snapshot.arrivals_per_s / total
    return [of_one * num for num in num_sessions]


def _reason(snapshot: Snapshot, chosen: ReplicaView) -> str:
    num_held = max(chosen.num_cpu_tokens, chosen.num_gpu_tokens)
    pool = max(0, (chosen.num_pool_tokens or 0) - num_held) if chosen.reads_pool else 0
    pooled = f", {pool:,} more in the pool" if pool else ""
    return (
        f"{num_held:,} of {snapshot.request.num_tokens:,} tokens cached{pooled}, "
        f"queue {chosen.queue_ms:,.0f} ms"
    )
