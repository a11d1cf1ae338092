"""What the router knows of its replicas, for /metrics, /readyz and the admin API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from router.config import ReplicaConfig
from router.fleet.fleet import CandidateStatus, Fleet
from router.fleet.replica import candidates_of
from router.index.caches import Caches
from router.index.rank_stream import RankStream
from router.metrics import RankState

Waiting = dict[str, str]
"""Replica name -> why it is not usable (yet), in the configuration's order."""


class Status:
    """Describes every replica, found or not, at the moment it is asked."""

    def __init__(
        self,
        replicas: Sequence[tuple[str, ReplicaConfig]],
        *,
        fleet: Fleet,
        caches: Caches,
        waiting: Waiting,
    ) -> None:
        self._replicas = replicas
        self._fleet = fleet
        self._caches = caches
        self._waiting = waiting

    def rank_states(self) -> Iterator[RankState]:
        """Describe every candidate, for /metrics."""
        now_s = time.monotonic()
        for status in self._fleet.status(now_s):
            stream = self._caches.stream(status.id)
            yield RankState(
                replica=status.id,
                state=self._caches.state(status.id),
                healthy=self._fleet.is_up(status.replica, now_s) and not status.draining,
                num_requests=status.num_requests,
                num_queued_tokens=status.num_queued_tokens,
                queue_ms=status.queue_ms,
                num_blocks={
                    "gpu": self._caches.index.num_blocks(status.id, "gpu"),
                    "cpu": self._caches.index.num_blocks(status.id, "cpu"),
                },
                events=_event_counts(stream) if stream is not None else {},
                cost_error_ms=status.cost.error_ms,
                trust=self._caches.trust(status.id),
            )

    def describe(self) -> list[dict[str, Any]]:
        """Describe every replica, for /admin/replicas; those never reached included."""
        statuses = {status.id: status for status in self._fleet.status(time.monotonic())}
        found = {replica.name: replica for replica in self._fleet.replicas}
        described: list[dict[str, Any]] = []
        for name, config in self._replicas:
            replica = found.get(name)
            if replica is None:
                waiting = self._waiting.get(name, "not discovered yet")
                described.append({"name": name, "url": config.url, "waiting_for": waiting})
                continue
            ranks = [self._describe_rank(statuses[c.id]) for c in candidates_of(replica)]
            described.append({"replica": replica, "ranks": ranks})
        return described

    def _describe_rank(self, status: CandidateStatus) -> dict[str, Any]:
        stream = self._caches.stream(status.id)
        return {
            "status": status,
            "cache": self._caches.state(status.id),
            "reason": stream.reason if stream is not None else "",
            "contract": stream.contract if stream is not None else None,
            "num_gpu_blocks": self._caches.index.num_blocks(status.id, "gpu"),
            "num_cpu_blocks": self._caches.index.num_blocks(status.id, "cpu"),
            "trust": self._caches.trust(status.id),
            "events": _event_counts(stream) if stream is not None else {},
        }


def _event_counts(stream: RankStream) -> dict[str, int]:
    """Count what happened to a stream's events; `num_` cut off: labels of one metric."""
    counters = msgspec.structs.asdict(stream.counters)
    return {name.removeprefix("num_"): value for name, value in counters.items()}
