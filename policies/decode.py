"""Where a prompt's answer is computed, and whether its prompt is, too: for replicas of role decode.

Both are decided in milliseconds. A decode replica that gets a prompt's KV from another replica
reads everything that it does not hold itself. A decode replica that computes the prompt reads what
the pool has and computes the rest. The answers that run there stand still meanwhile, which counts
for each of them. Only the replica that gave a session's last answer has its blocks (a pool gets
prompts), so it has least to read of the next turn.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from policies.cost import TIE_MS
from policies.load import pick
from policies.policy import Policy
from policies.view import CandidateCost, Decision, ReplicaView, Snapshot


class DecodeLoad(Policy, frozen=True, kw_only=True):
    """Choose among replicas of role decode: the lowest `queue + KV + answer_tokens x ITL`.
    Candidates with free KV blocks for prompt and answer go first, because an engine that runs out
    of blocks recomputes a request. `KV` is the lower of two prices for the blocks that the replica
    lacks. One is the time to read them. The other is the time to compute them, once for the request
    and once for each answer in progress, which is delayed as long. `ITL` is the inter-token latency
    with one more request, learned from engine metrics. Until it is known for all candidates,
    `request_ms x requests` stands for the answer. So a session stays with its replica until another
    one saves more time than its KV blocks cost.
    """

    name: ClassVar[str] = "decode_load"

    request_ms: Annotated[
        float, Meta(ge=0.0, le=10_000.0, description="Price of a request in flight")
    ] = 20.0
    answer_tokens: Annotated[
        float, Meta(ge=1.0, le=100_000.0, description="Tokens that an answer is taken to have")
    ] = 200.0

    def decide(self, snapshot: Snapshot) -> Decision:
        views = snapshot.replicas
        is_timed = all(view.tbt_ms is not None for view in views)
        costs = tuple([_cost(snapshot, view, self._answer_ms(view, is_timed)) for view in views])
        num_needed = snapshot.request.num_tokens + self.answer_tokens
        roomy = [
            pair
            for pair in zip(views, costs, strict=True)
            if pair[0].num_free_tokens is None or pair[0].num_free_tokens >= num_needed
        ]
        offered = roomy or list(zip(views, costs, strict=True))
        bound = min([cost.total_ms for _, cost in offered]) + TIE_MS
        chosen = pick(snapshot, [view for view, cost in offered if cost.total_ms <= bound])
        num_held = max(chosen.num_gpu_tokens, chosen.num_cpu_tokens)
        return Decision(
            candidate=chosen.id,
            reason=f"{chosen.num_requests:,} in flight, {num_held:,} of "
            f"{snapshot.request.num_tokens:,} tokens there"
            + (f", {chosen.tbt_ms:,.1f} ms a token" if is_timed else "")
            + ("" if roomy else ", no replica has free KV for it"),
            costs=costs,
        )

    def _answer_ms(self, view: ReplicaView, is_timed: bool) -> float:
        """Predict what an answer there takes, or what stands for it."""
        if is_timed and view.tbt_ms is not None:
            return self.answer_tokens * view.tbt_ms
        return self.request_ms * view.num_requests


def local_ms(snapshot: Snapshot, view: ReplicaView) -> float:
    """Predict what a prompt costs a replica that reads what there is, and computes the rest.

    That is its own time, and for each answer that runs there the time that computing takes.
    """
    own_ms, others_ms = _local_ms(snapshot, view)
    return own_ms + others_ms


def _local_ms(snapshot: Snapshot, view: ReplicaView) -> tuple[float, float]:
    """Split `local_ms`: its own time, and the others'."""
    num_tokens = snapshot.request.num_tokens
    num_own = num_held = max(view.num_gpu_tokens, view.num_cpu_tokens)
    if view.reads_pool:
        num_held = min(num_tokens, max(num_own, view.num_pool_tokens or 0))
    read_ms = view.cost.fetch_ms(
        num_held - view.num_gpu_tokens,
        from_pool=num_held > num_own,
        num_on_disk=view.num_disk_tokens,
    )
    compute_ms = view.cost.prefill_ms(num_tokens - num_held, num_held) - view.cost.base_ms
    num_answering = max(0, view.num_requests - view.num_waiting)
    return read_ms + compute_ms, num_answering * compute_ms


def transfer_ms(snapshot: Snapshot, view: ReplicaView) -> float:
    """Predict what it takes a replica to read all of a prompt's KV that it does not hold itself."""
    num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
    return view.cost.fetch_ms(max(0, snapshot.request.num_tokens - num_own), from_pool=True)


def _cost(snapshot: Snapshot, view: ReplicaView, answer_ms: float) -> CandidateCost:
    num_tokens = snapshot.request.num_tokens
    num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
    here_ms, delay_ms = _local_ms(snapshot, view)
    there_ms = transfer_ms(snapshot, view)
    is_read = there_ms < here_ms + delay_ms
    kv_ms, others_ms = (there_ms, answer_ms) if is_read else (here_ms, answer_ms + delay_ms)
    return CandidateCost(
        id=view.id,
        num_uncached_tokens=0 if is_read else num_tokens - num_own,
        num_fetched_tokens=num_tokens - num_own if is_read else 0,
        queue_ms=view.queue_ms,
        fetch_ms=kv_ms if is_read else 0.0,
        prefill_ms=view.cost.base_ms + (0.0 if is_read else kv_ms),
        others_ms=others_ms,
        total_ms=view.queue_ms + kv_ms + view.cost.base_ms + others_ms,
    )
