"""LMetric: one product in place of weights for the cache and for load."""

from __future__ import annotations

from typing import ClassVar

from policies.load import least_loaded
from policies.policy import Policy
from policies.view import Decision, ReplicaView, Snapshot


class Lmetric(Policy, frozen=True, kw_only=True):
    """Choose the least `new prompt tokens x (requests in flight + 1)`: LMetric (arXiv 2603.15202),
    by its authors in production at Alibaba. New tokens are those of this prompt that the candidate
    would compute: neither its GPU, its CPU tier nor its pool has them. Equal products go to the
    least loaded. The product has no unit and no weight to tune, and knows nothing of time.
    """

    name: ClassVar[str] = "lmetric"

    def decide(self, snapshot: Snapshot) -> Decision:
        num_tokens, replicas = snapshot.request.num_tokens, snapshot.replicas
        products = [_num_new(num_tokens, view) * (view.num_requests + 1) for view in replicas]
        lowest = min(products)
        equals = [view for view, each in zip(replicas, products, strict=True) if each == lowest]
        chosen = least_loaded(snapshot, equals)
        num_new = _num_new(num_tokens, chosen)
        reason = f"{num_new:,} new tokens x ({chosen.num_requests:,} in flight + 1)"
        return Decision(candidate=chosen.id, reason=reason)


def _num_new(num_tokens: int, replica: ReplicaView) -> int:
    return num_tokens - replica.num_cached_tokens
