"""The state of the replicas, for /metrics, /readyz and the admin API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from policies.view import CandidateId
from router.base.addresses import place_digest
from router.base.messages import Evacuation
from router.index.cache_view import CacheView
from router.index.candidate_stream import CandidateStream
from router.index.last_block import LastBlock
from router.metrics import PoolState, RankState, SharingState, SourceState
from router.pool.status import PoolStatus
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet
from router.replicas.loss import NO_LOSS, CandidateLoss
from router.replicas.registry import Registry
from router.replicas.replica import candidates_of

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
        sharing: Callable[[], SharingState] | None,
        sources: Callable[[], Sequence[SourceState]] = tuple,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._caches = caches
        self._waiting = waiting
        self.pools = pools
        self._sharing = sharing
        self._sources = sources
        self.losses: Callable[[], Mapping[CandidateId, CandidateLoss]] = dict
        """Returns what losing each candidate would cost; empty: not known."""

    def rank_states(self) -> Iterator[RankState]:
        """Describe every candidate, for /metrics."""
        now_s = time.monotonic()
        conversations = self._fleet.conversations
        conversations.expire(now_s)
        losses = self.losses()
        for status in self._fleet.load.status(now_s):
            stream = self._caches.stream(status.id)
            last_block = self._caches.index.last_blocks.get(status.id)
            replica = self._fleet.members.replica(status.replica)
            capacity = self._fleet.load.capacity_tokens(status.id)
            num_live_tokens = conversations.num_tokens_at(status.id)
            loss = losses.get(status.id, NO_LOSS)
            yield RankState(
                replica=status.id,
                state=self._caches.state(status.id),
                healthy=self._fleet.members.is_up(status.replica, now_s) and replica.is_offered,
                withheld={
                    "draining": replica.draining,
                    "asleep": replica.asleep,
                    "paused": replica.paused,
                    "stalled": status.state == "stalled",
                },
                num_requests=status.num_requests,
                num_elsewhere=status.num_elsewhere,
                num_queued_tokens=status.num_queued_tokens,
                queue_ms=status.queue_ms,
                num_blocks={
                    "gpu": self._caches.index.num_blocks(status.id, "gpu"),
                    "cpu": self._caches.index.num_blocks(status.id, "cpu"),
                },
                events=_event_counts(stream) if stream is not None else {},
                cost_error_ms=status.cost.error_ms,
                trust=self._caches.trust(status.id),
                cpu_trust=self._caches.cpu_trust(status.id),
                drops_last=last_block.is_dropped if last_block is not None else None,
                num_sessions=conversations.at(status.id).num_sessions,
                footprint_ratio=num_live_tokens / capacity if capacity else None,
                num_loss_tokens=loss.num_tokens,
                loss_s=loss.compute_s,
            )

    def places(self) -> Iterator[tuple[str, str]]:
        """Yield each replica's name and a digest of its address, for /metrics; found or not."""
        for entry in self._registry.entries:
            yield entry.name, place_digest(entry.replica.url)

    def pool_states(self) -> Sequence[PoolState]:
        """Describe the shared pools, for /metrics."""
        return self.pools.states(time.monotonic())

    def describe(self) -> list[dict[str, Any]]:
        """Describe every replica, for /admin/replicas; those never reached included."""
        statuses = {status.id: status for status in self._fleet.load.status(time.monotonic())}
        losses = self.losses()
        found = {replica.name: replica for replica in self._fleet.members.replicas}
        described: list[dict[str, Any]] = []
        for entry in self._registry.entries:
            entry_info: dict[str, Any] = {
                "name": entry.name,
                "url": entry.replica.url,
                "draining": entry.draining,
                "leaving": entry.leaving,
            }
            if entry.source is not None:
                entry_info |= {"source": entry.source, "ready": entry.is_ready}
            if entry.evacuation is not None:
                entry_info["evacuation"] = self._evacuation(entry.name, entry.evacuation)
            replica = found.get(entry.name)
            if replica is None:
                entry_info["waiting_for"] = self._waiting.get(entry.name, UNDISCOVERED)
            else:
                entry_info["replica"] = replica
                ports = replica.event_ports
                entry_info["warning"] = ports.why_doubtful() if ports is not None else None
                entry_info["ranks"] = [
                    self._describe_rank(statuses[c.id], losses.get(c.id, NO_LOSS))
                    for c in candidates_of(replica)
                ]
            described.append(entry_info)
        return described

    def _evacuation(self, name: str, evacuation: Evacuation) -> dict[str, Any]:
        """Describe how far an evacuation is. It is over if nothing is there that could stay."""
        self._fleet.conversations.expire(time.monotonic())
        ids = [
            c.id
            for each in self._fleet.members.replicas
            if each.name == name
            for c in candidates_of(each)
        ]
        losses = self.losses()
        num_sessions = sum(self._fleet.conversations.at(id_).num_sessions for id_ in ids)
        num_requests = self._fleet.load.num_sent(name)
        left_s = max(0.0, evacuation.until - time.time())
        return {
            "sessions": num_sessions,
            "tokens": sum(losses.get(id_, NO_LOSS).num_tokens for id_ in ids),
            "requests": num_requests,
            "left_s": round(left_s, 3),
            "is_over": not num_requests and (not num_sessions or not left_s),
        }

    def sharing(self) -> dict[str, Any] | None:
        """Describe the connection to Redis and to other routers; None: there is no Redis."""
        if self._sharing is None:
            return None
        state = self._sharing()
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

    def _describe_rank(self, status: CandidateStatus, loss: CandidateLoss) -> dict[str, Any]:
        stream = self._caches.stream(status.id)
        state, reason = self._caches.state_and_reason(status.id)
        return {
            "status": status,
            "cache": state,
            "reason": reason,
            "contract": stream.contract if stream is not None else None,
            "num_gpu_blocks": self._caches.index.num_blocks(status.id, "gpu"),
            "num_cpu_blocks": self._caches.index.num_blocks(status.id, "cpu"),
            "trust": self._caches.trust(status.id),
            "cpu_trust": self._caches.cpu_trust(status.id),
            "not_understood": sorted(stream.unknown) if stream is not None else [],
            "eagle": _eagle(self._caches.index.last_blocks.get(status.id)),
            "num_sessions": self._fleet.conversations.at(status.id).num_sessions,
            "loss": {"tokens": loss.num_tokens, "seconds": loss.compute_s},
            "reads_pool": self.pools.reads(status.id),
            "events": _event_counts(stream) if stream is not None else {},
        }


def _eagle(last_block: LastBlock | None) -> dict[str, bool | int] | None:
    """Describe whether the last block of hits is dropped; None: the engine does not speculate."""
    if last_block is None:
        return None
    return {
        "drops_last_block": last_block.is_dropped,
        "learned": last_block.is_learned,
        "changes": last_block.num_changes,
    }


def _event_counts(stream: CandidateStream) -> dict[str, int]:
    """Count what happened to a stream's events; `num_` cut off: labels of one metric."""
    return _unprefixed(stream.counters.by_name())


def _unprefixed(counts: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix("num_"): count for name, count in counts.items()}
