"""Mooncake's own scheduling rule, as published: a ratio decides between computing and fetching."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from policies.load import delay_ms, pick
from policies.policy import Policy
from policies.view import CandidateCost, Decision, ReplicaView, Snapshot


class Mooncake(Policy, frozen=True, kw_only=True):
    """Algorithm 1 of Mooncake (arXiv 2407.00079 and FAST'25), "KVCache-centric" scheduling. Each
    candidate's TTFT is estimated in one of two ways, and the lowest wins. If its own prefix is
    nearly the best one, `best <= threshold x own`, it computes the rest: `queue + prefill(prompt,
    own)`. Otherwise it first fetches what it lacks of the best prefix: `transfer + queue +
    prefill(prompt, best)`.
    """

    name: ClassVar[str] = "mooncake"

    kvcache_balancing_threshold: Annotated[
        float,
        Meta(ge=1.0, description="Best prefix over own prefix, above which a transfer is priced"),
    ] = 2.0

    def decide(self, snapshot: Snapshot) -> Decision:
        replicas = snapshot.replicas
        best = max(max(_own_tokens(view), view.num_pool_tokens or 0) for view in replicas)
        costs = tuple([self._estimate(snapshot, replica, best) for replica in replicas])
        lowest = min([cost.total_ms for cost in costs])
        chosen = pick(
            snapshot,
            [r for r, cost in zip(replicas, costs, strict=True) if cost.total_ms == lowest],
        )
        num_fetched = next(c.num_fetched_tokens for c in costs if c.id == chosen.id)
        reason = (
            f"{_own_tokens(chosen):,} of {snapshot.request.num_tokens:,} tokens cached, "
            f"{best:,} at best, {num_fetched:,} to read, queue {chosen.queue_ms:,.0f} ms"
        )
        return Decision(candidate=chosen.id, reason=reason, costs=costs)

    def _estimate(self, snapshot: Snapshot, replica: ReplicaView, best: int) -> CandidateCost:
        """Estimate one candidate's TTFT; lines 6 to 22 of the arXiv version."""
        own = held = _own_tokens(replica)
        if best > self.kvcache_balancing_threshold * own and replica.reads_pool:
            held = max(own, replica.num_pool_tokens or 0)
        num_fetched = held - replica.num_gpu_tokens
        num_uncached = snapshot.request.num_tokens - held
        queue_ms = delay_ms(replica)
        num_on_disk = replica.num_disk_tokens if held > own else 0
        fetch_ms = replica.cost.fetch_ms(num_fetched, from_pool=held > own, num_on_disk=num_on_disk)
        prefill_ms = replica.cost.prefill_ms(num_uncached, held)
        unsure_ms = replica.cost.fetch_margin_ms(num_fetched, num_on_disk) if held > own else 0.0
        return CandidateCost(
            id=replica.id,
            num_uncached_tokens=num_uncached,
            num_fetched_tokens=num_fetched,
            queue_ms=queue_ms,
            fetch_ms=fetch_ms,
            prefill_ms=prefill_ms,
            others_ms=unsure_ms,
            total_ms=queue_ms + fetch_ms + prefill_ms + unsure_ms,
        )


def _own_tokens(replica: ReplicaView) -> int:
    return max(replica.num_gpu_tokens, replica.num_cpu_tokens)
