"""Policies that compare milliseconds: what a request waits, and what it makes others wait."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from policies.load import pick
from policies.policy import Policy
from policies.view import CandidateCost, Decision, ReplicaView, Snapshot

TIE_MS = 1.0
TIE_RATIO = 0.01
"""Totals closer than 1 ms or 1 % are alike: no cost model predicts better than that."""

MIN_BUSY = 0.1
"""Least share of `busy`: on an idle fleet, too, computing a prefix twice must save more than a
little. Sub-agents that start together then join the first of them (see `KvAware`), a queue of
less than alpha x 0.1 times the work saved is waited for, and mean times do not change: queue
model, conversation trace, load 0.3: 0.53 s with and without."""


class MinTtft(Policy, frozen=True, kw_only=True):
    """The soonest first token: lowest `ttft = queue + fetch + prefill`. `queue` is the time until
    the prefills ahead are done, `fetch` reads what the candidate's cpu tier or the shared pool
    holds beyond its GPU match, `prefill(u, c)` computes the u uncached tokens behind the c cached
    ones, all by the candidate's learned cost model. Greedy: right for this request, blind to what
    its work does to the next ones."""

    name: ClassVar[str] = "min_ttft"

    def decide(self, snapshot: Snapshot) -> Decision:
        return cheapest(snapshot, GREEDY)


class KvAware(Policy, frozen=True, kw_only=True):
    """The lowest cost to all requests: `queue + (1 + alpha x busy) x (fetch + prefill) + (gamma x
    waiting + delta x decoding + beta x pressure) x compute`, `compute` being the prefill without
    its constant part. The request's own work delays the requests behind it, so under load
    recomputing what another candidate holds costs more than this request's own wait. `busy` is the
    share of recent time with a prefill at work, in the mean of the candidates and at least 0.1, and
    alpha the number of requests a fully busy candidate makes wait: prompts stay at their caches
    until the queue there exceeds (1 + alpha x busy) times the work saved. `waiting` and `decoding`
    are the candidate's own requests before and after their first token. Requests come in bursts, to
    the cache they share: each one that waits here announces gamma others that will wait for this
    one too, so what a request brings of its own goes where fewer wait, and hot prefixes get copies
    before their first holder is overrun. Those that decode are slowed by delta of it: a prefill
    shares their steps. What is computed also pushes something out: `pressure` is the share of the
    candidate's cache that was overwritten lately, less that of the candidate with the least, beta
    the price of a token pushed out, in tokens computed: without it a fleet with little to do would
    fill one cache over and over and leave the others empty. alpha = beta = gamma = delta = 0 is
    `min_ttft`."""

    name: ClassVar[str] = "kv_aware"

    alpha: Annotated[
        float,
        Meta(
            ge=0.0,
            le=100.0,
            description="Weight of the delay to others when always busy, in units of own work",
        ),
    ] = 2.0
    beta: Annotated[
        float,
        Meta(
            ge=0.0,
            le=100.0,
            description="Weight of what the request evicts, in the same units",
        ),
    ] = 2.0
    gamma: Annotated[
        float,
        Meta(
            ge=0.0,
            le=100.0,
            description="Requests to come for each that waits at the candidate, in the same units",
        ),
    ] = 3.0
    delta: Annotated[
        float,
        Meta(
            ge=0.0,
            le=100.0,
            description="Weight of the delay to each request that decodes there, in the same units",
        ),
    ] = 0.1

    def decide(self, snapshot: Snapshot) -> Decision:
        return cheapest(snapshot, self)


GREEDY = KvAware(alpha=0.0, beta=0.0, gamma=0.0, delta=0.0)
"""No other request counts."""


def cheapest(snapshot: Snapshot, prices: KvAware) -> Decision:
    """Choose the lowest total; alike totals go to the longest match, then to the least busy.

    The longest match before the least busy: among equals, moving a conversation away from its
    cache buys nothing and leaves two copies of it. Cold and short prompts match alike
    everywhere, so they spread by requests in flight, then by a draw.
    """
    costs = candidate_costs(snapshot, prices)
    lowest = min([cost.total_ms for cost in costs])
    bound = lowest + max(TIE_MS, TIE_RATIO * lowest)
    ranked = [
        (cost.num_uncached_tokens, cost.num_fetched_tokens, replica.num_requests, index)
        for index, (cost, replica) in enumerate(zip(costs, snapshot.replicas, strict=True))
        if cost.total_ms <= bound
    ]
    best = min(ranked)[:3]
    chosen = pick(snapshot, [snapshot.replicas[r[3]] for r in ranked if r[:3] == best])
    return Decision(candidate=chosen.id, reason=_reason(snapshot, chosen), costs=costs)


def candidate_costs(snapshot: Snapshot, prices: KvAware = GREEDY) -> tuple[CandidateCost, ...]:
    """Price every candidate; shape (num_replicas,), in the snapshot's order.

    The engine fetches whatever its cpu tier or the pool holds, it does not weigh that against
    computing; so the prediction does the same. Busy is the mean of all: work that an idle
    candidate takes off a busy one makes fewer requests wait, not more. `CostModel.prefill_ms` is
    written out: 64 calls would be half of the time of a decision.
    """
    num_tokens = snapshot.request.num_tokens
    num_pool_tokens = snapshot.num_pool_tokens or 0
    busy_ratio = sum([replica.busy_ratio for replica in snapshot.replicas])
    delayed = prices.alpha * max(MIN_BUSY, busy_ratio / len(snapshot.replicas))
    beta, gamma, delta = prices.beta, prices.gamma, prices.delta
    lowest_pressure = min(1.0, min([replica.cache_pressure for replica in snapshot.replicas]))
    costs: list[CandidateCost] = []
    for replica in snapshot.replicas:
        model = replica.cost
        num_gpu = replica.num_gpu_tokens
        num_held = max(num_gpu, replica.num_cpu_tokens)
        if replica.reads_pool and num_pool_tokens > num_held:
            num_held = num_pool_tokens
        num_uncached = num_tokens - num_held
        num_fetched = num_held - num_gpu
        num_decoding = replica.num_requests - replica.num_waiting
        queue_ms = replica.queue_ms + model.ms_per_running * num_decoding
        fetch_ms = model.ms_per_fetched_token * num_fetched
        compute_ms = (
            model.ms_per_token * num_uncached
            + model.ms_per_mtoken2 * num_uncached * (num_held + 0.5 * num_uncached) * 1e-6
        )
        prefill_ms = model.base_ms + compute_ms
        price = gamma * replica.num_waiting + delta * num_decoding
        if replica.cache_pressure > lowest_pressure:
            price += beta * (min(1.0, replica.cache_pressure) - lowest_pressure)
        others_ms = delayed * (fetch_ms + prefill_ms) + price * compute_ms
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


def _reason(snapshot: Snapshot, chosen: ReplicaView) -> str:
    num_held = max(chosen.num_cpu_tokens, chosen.num_gpu_tokens)
    pool = max(0, (snapshot.num_pool_tokens or 0) - num_held) if chosen.reads_pool else 0
    pooled = f", {pool:,} more in the pool" if pool else ""
    return (
        f"{num_held:,} of {snapshot.request.num_tokens:,} tokens cached{pooled}, "
        f"queue {chosen.queue_ms:,.0f} ms"
    )
