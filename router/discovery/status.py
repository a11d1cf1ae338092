"""The state of the replicas, for /metrics, /readyz and the admin API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from router.cluster.sharing import Sharing
from router.index.cache_view import CacheView
from router.index.candidate_stream import CandidateStream
from router.metrics import PoolState, SourceState
from router.pool.pools import PoolStatus
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidates_of
from router.replicas.state import RankState, ReplicaState

Waiting = dict[str, str]
"""Replica or source name -> why it is not usable (yet), in the configuration's order."""

UNDISCOVERED: Final = "not discovered yet"
"""The reason until the first attempt to discover it has ended."""


class Status:
    """Describes every replica now, found or not."""

    def __init__(
        self,
        registry: Registry,
        *,
        fleet: Fleet,
        caches: CacheView,
        waiting: Waiting,
        pools: PoolStatus,
        sharing: Sharing | None,
        sources: Callable[[], Sequence[SourceState]] = tuple,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._caches = caches
        self._waiting = waiting
        self.pools = pools
        self._sharing = sharing
        self._sources = sources

    def statuses(self) -> tuple[CandidateStatus, ...]:
        """Describe the load of every candidate."""
        now_s = time.monotonic()
        self._fleet.conversations.expire(now_s)
        return self._fleet.load.status(now_s)

    def rank(self, status: CandidateStatus) -> RankState:
        """Describe a candidate, for every view; its load was described just now."""
        id_, fleet, caches = status.id, self._fleet, self._caches
        replica, stream = fleet.members.replica(status.replica), caches.stream(id_)
        cache, reason = caches.state_and_reason(id_)
        now_s = time.monotonic()
        is_up = fleet.members.is_up(status.replica, now_s)
        return RankState(
            replica=replica,
            may_be_chosen=is_up and replica.is_offered,
            has_several_engines=fleet.members.has_several(status.replica, now_s),
            status=status,
            cache=cache,
            reason=reason,
            contract=stream.contract if stream is not None else None,
            num_gpu_blocks=caches.index.num_blocks(id_, "gpu"),
            num_cpu_blocks=caches.index.num_blocks(id_, "cpu"),
            trust=caches.trust(id_),
            cpu_trust=caches.cpu_trust(id_),
            not_understood=sorted(stream.unknown) if stream is not None else [],
            drops_last_block=id_ in caches.index.dropping,
            num_sessions=fleet.conversations.working_set(id_).num_sessions,
            num_live_tokens=round(fleet.conversations.working_set(id_).num_expected_tokens),
            capacity_tokens=fleet.load.capacity_tokens(id_),
            reads_pool=self.pools.reads(id_),
            events=_event_counts(stream) if stream is not None else {},
        )

    def rank_states(self) -> Iterator[RankState]:
        """Describe every candidate, for /metrics."""
        return map(self.rank, self.statuses())

    def replicas(self) -> Iterator[ReplicaState]:
        """Describe every replica; those never reached included."""
        statuses = {status.id: status for status in self.statuses()}
        found = {replica.name: replica for replica in self._fleet.members.replicas}
        for entry in self._registry.entries:
            replica, evacuation = found.get(entry.name), entry.evacuation
            candidates = candidates_of(replica) if replica is not None else ()
            yield ReplicaState(
                entry=entry,
                left_s=None if evacuation is None else max(0.0, evacuation.until - time.time()),
                replica=replica,
                waiting_for=self._waiting.get(entry.name, UNDISCOVERED),
                ranks=[self.rank(statuses[each.id]) for each in candidates],
            )

    def pool_states(self) -> Sequence[PoolState]:
        """Describe the shared pools, for /metrics."""
        return self.pools.states(time.monotonic())

    def sharing(self) -> dict[str, Any] | None:
        """Describe the connection to Redis and to other routers; None: there is no Redis."""
        if self._sharing is None:
            return None
        state = self._sharing.state()
        return {
            "state": "shared" if state.is_up else "degraded",
            "reason": state.reason,
            "redis": state.redis,
            "routers": state.num_routers,
            "roles": state.roles,
        }

    def sources(self) -> Sequence[SourceState]:
        """Describe where replicas are looked for."""
        return self._sources()


def _event_counts(stream: CandidateStream) -> dict[str, int]:
    """Count what happened to a stream's events; `num_` cut off: labels of one metric."""
    return _unprefixed(stream.counters.by_name())


def _unprefixed(counts: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix("num_"): count for name, count in counts.items()}
