"""What a router knows of its replicas, of pools and of other routers: each fact is named once.

Every view is made of these records:

    GET /admin/replicas, /admin/pool, `warmroute replicas`           all of it
    GET /admin/state, the live page, `warmroute status`              `router.observers.live`
    GET /metrics                                                     `router.metrics.families`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from policies.view import CandidateId
from router.base.messages import Evacuation
from router.cluster.sharing import Sharing
from router.index.cache_view import CacheView
from router.index.candidate_stream import StreamReason
from router.pool.pools import PoolStatus
from router.replicas.candidate_state import ON_PURPOSE, CandidateStatus
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidates_of

Waiting = dict[str, str]
"""Replica or source name -> why it is not usable (yet), in the configuration's order."""

UNDISCOVERED: Final = "not discovered yet"
"""The reason until the first attempt to discover it has ended."""

State = dict[str, Any]


class Status:
    """Describes everything now."""

    def __init__(
        self,
        registry: Registry,
        *,
        fleet: Fleet,
        caches: CacheView,
        waiting: Waiting,
        pools: PoolStatus,
        sharing: Sharing | None,
        sources: Callable[[], Sequence[Struct]] = tuple,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._caches = caches
        self._waiting = waiting
        self._pools = pools
        self._sharing = sharing
        self._sources = sources

    def loads(self) -> tuple[CandidateStatus, ...]:
        """Describe the load of every candidate."""
        now_s = time.monotonic()
        self._fleet.conversations.expire(now_s)
        return self._fleet.load.status(now_s)

    def candidate(self, load: CandidateStatus) -> State:
        """Describe a candidate whose load was described just now. None: not known."""
        id_, fleet, caches, now_s = load.id, self._fleet, self._caches, time.monotonic()
        replica, stream = fleet.members.replica(load.replica), caches.stream(id_)
        held, capacity = fleet.conversations.working_set(id_), fleet.load.capacity_tokens(id_)
        cache, why_not_exact = caches.state_and_reason(id_)
        awaits = replica.publishes_events and why_not_exact == StreamReason.NO_EVENTS
        num_blocks = caches.index.num_blocks(id_, "gpu")
        return {
            **asdict(load),
            "model": replica.base_model,
            "role": replica.role,
            "may_be_chosen": fleet.members.is_up(load.replica, now_s) and replica.is_offered,
            "withheld": {  # why it gets no new requests -> whether that is so
                **{name: getattr(replica, name) for name in ON_PURPOSE},
                "stalled": load.state == "stalled",
            },
            "has_several_engines": fleet.members.has_several(load.replica, now_s),  # in turn
            "publishes_events": replica.publishes_events,
            "caches_prefixes": replica.caches_prefixes,
            "cache": cache,  # how well it is known: exact | degraded | blind
            "cache_reason": why_not_exact,
            "awaits_events": awaits and not num_blocks,  # it was not sent a whole block
            "contract": stream.contract if stream is not None else None,
            "num_gpu_blocks": num_blocks,  # in the index
            "num_cpu_blocks": caches.index.num_blocks(id_, "cpu"),
            "cache_fill": num_blocks / replica.num_blocks if replica.num_blocks else None,
            "trust": caches.trust(id_),  # share of recent predictions that were right, 1.0 at first
            "cpu_trust": caches.cpu_trust(id_),  # the same of its cpu tier
            "not_understood": sorted(stream.unknown) if stream is not None else [],  # prompt kinds
            "drops_last_block": id_ in caches.index.dropping,  # of each hit (EAGLE, MTP)
            "num_sessions": held.num_sessions,  # conversations that are alive there
            "live_fill": round(held.num_expected_tokens) / capacity if capacity else None,
            "reads_pool": self._pools.reads(id_),  # None: there is no pool
            "events": stream.counters.by_name() if stream is not None else {},
        }

    def candidates(self) -> dict[CandidateId, State]:
        """Describe every candidate."""
        return {load.id: self.candidate(load) for load in self.loads()}

    def replicas(self) -> Iterator[State]:
        """Describe every replica; those never reached included."""
        candidates = self.candidates()
        found = {replica.name: replica for replica in self._fleet.members.replicas}
        for entry in self._registry.entries:
            replica = found.get(entry.name)
            ids = [each.id for each in candidates_of(replica)] if replica is not None else []
            ranks = [candidates[id_] for id_ in ids]
            fields: State = {
                "name": entry.name,
                "url": entry.replica.url,
                "draining": entry.draining,
                "leaving": entry.leaving,
            }
            if entry.source is not None:
                fields |= {"source": entry.source, "ready": entry.is_ready}
            if entry.evacuation is not None:
                fields["evacuation"] = _evacuation(entry.evacuation, ranks)
            if replica is None:
                fields["waiting_for"] = self._waiting.get(entry.name, UNDISCOVERED)
            else:
                ports = replica.event_ports
                warning = ports.why_doubtful() if ports is not None else None
                fields |= {"replica": replica, "warning": warning, "ranks": ranks}
            yield fields

    def sharing(self) -> State | None:
        """Describe the connection to Redis and to other routers; None: there is no Redis."""
        return self._sharing.state() if self._sharing is not None else None

    def sources(self) -> list[State]:
        """Describe where replicas are looked for."""
        return [asdict(each) for each in self._sources()]

    def pools(self) -> list[State]:
        """Describe the shared pools."""
        return self._pools.describe(time.monotonic())


def _evacuation(evacuation: Evacuation, ranks: Sequence[State]) -> State:
    """Describe how far it is. It is over if nothing is there that could stay."""
    num_sessions = sum(rank["num_sessions"] for rank in ranks)
    num_requests = sum(rank["num_requests"] for rank in ranks)
    left_s = max(0.0, evacuation.until - time.time())
    return {
        "sessions": num_sessions,
        "requests": num_requests,
        "left_s": round(left_s, 3),
        "is_over": not num_requests and (not num_sessions or not left_s),
    }
