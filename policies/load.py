"""Policies that look at load alone, and the one notion of load all policies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.hashing import draw
from policies.policy import Policy
from policies.view import Decision, ReplicaView, Snapshot


def delay_ms(replica: ReplicaView) -> float:
    """Predict how long a first token waits for the load: queue ahead plus running decodes."""
    num_decoding = replica.num_requests - replica.num_waiting
    return replica.queue_ms + replica.cost.ms_per_running * num_decoding


def load(replica: ReplicaView) -> tuple[float, int]:
    """Order candidates by load: predicted delay, then requests in flight."""
    return delay_ms(replica), replica.num_requests


def least_loaded(snapshot: Snapshot, replicas: Sequence[ReplicaView]) -> ReplicaView:
    """Pick the least loaded of `replicas`; equals are drawn, so that an idle fleet spreads."""
    lowest = min(map(load, replicas))
    return pick(snapshot, [replica for replica in replicas if load(replica) == lowest])


def pick(snapshot: Snapshot, equals: Sequence[ReplicaView]) -> ReplicaView:
    """Draw one of `equals` by seed and decision number."""
    if len(equals) == 1:
        return equals[0]
    return equals[draw(snapshot.seed, snapshot.number) % len(equals)]


def load_text(replica: ReplicaView) -> str:
    return f"{replica.num_requests:,} in flight, queue {replica.queue_ms:,.0f} ms"


class Random(Policy, frozen=True, kw_only=True):
    """Choose each candidate with the same probability: `splitmix64(seed, number) mod n`. It ignores
    load and caches, and is the lower bound for all other policies.
    """

    name: ClassVar[str] = "random"

    def decide(self, snapshot: Snapshot) -> Decision:
        chosen = pick(snapshot, snapshot.replicas)
        return Decision(candidate=chosen.id, reason=f"random of {len(snapshot.replicas)}")


class RoundRobin(Policy, frozen=True, kw_only=True):
    """Choose one candidate after the other: `number mod n`, with the decision number as the only
    state. Requests are spread evenly, work is not: long prompts may queue behind each other.
    """

    name: ClassVar[str] = "round_robin"

    def decide(self, snapshot: Snapshot) -> Decision:
        num_replicas = len(snapshot.replicas)
        turn = snapshot.number % num_replicas
        return Decision(
            candidate=snapshot.replicas[turn].id, reason=f"turn {turn + 1} of {num_replicas}"
        )


class LeastLoaded(Policy, frozen=True, kw_only=True):
    """Choose the candidate with the shortest wait for a first token: the lowest `queue_ms +
    ms_per_running x decoding`, then the fewest requests in flight, then at random. It ignores
    caches, and is the baseline that a cache-aware policy has to beat.
    """

    name: ClassVar[str] = "least_loaded"

    def decide(self, snapshot: Snapshot) -> Decision:
        chosen = least_loaded(snapshot, snapshot.replicas)
        return Decision(candidate=chosen.id, reason=f"least loaded: {load_text(chosen)}")


class PowerOfTwo(Policy, frozen=True, kw_only=True):
    """Choose the less loaded of two random candidates. It is nearly as even as `least_loaded`, and
    robust if load figures are old: several routers never all choose the same candidate.
    """

    name: ClassVar[str] = "power_of_two"

    def decide(self, snapshot: Snapshot) -> Decision:
        replicas = snapshot.replicas
        first = draw(snapshot.seed, snapshot.number, 1) % len(replicas)
        chosen = replicas[first]
        if len(replicas) > 1:
            step = draw(snapshot.seed, snapshot.number, 2) % (len(replicas) - 1)
            second = replicas[(first + 1 + step) % len(replicas)]
            chosen = min(chosen, second, key=load)
        return Decision(candidate=chosen.id, reason=f"less loaded of two: {load_text(chosen)}")
