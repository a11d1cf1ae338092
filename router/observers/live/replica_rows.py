"""The replicas as the live page shows them: known caches, fullness, load, right predictions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from policies.view import CandidateId
from router.discovery.status import Waiting
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet
from router.replicas.loss import NO_LOSS, CandidateLoss

MAX_ROWS: Final = 50
"""More are counted only. Those in trouble and those with the longest queues are shown."""

_RIGHT: Final = ("exact", "evicted")  # when the prediction was made


class ReplicaRows:
    """Describes the replicas now, a row for each rank."""

    def __init__(
        self,
        fleet: Fleet,
        caches: CacheView,
        waiting: Waiting,
        metrics: Metrics,
        losses: Callable[[], Mapping[CandidateId, CandidateLoss]],
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._waiting = waiting
        self._metrics = metrics
        self._losses = losses

    def describe(self) -> dict[str, Any]:
        """Count all by state, and describe the first `MAX_ROWS`."""
        statuses = self._fleet.load.status(time.monotonic())
        caches = {each.id: self._caches.state(each.id) for each in statuses}
        shown = [*statuses]
        if len(shown) > MAX_ROWS:
            shown = nlargest(MAX_ROWS, shown, key=lambda each: _urgency(caches[each.id], each))
        audited, predictions = self._audited({each.id for each in shown})
        losses = self._losses()
        missing = dict(list(self._waiting.items())[:MAX_ROWS])
        return {
            "total": len(statuses),
            "by_cache": Counter(caches.values()),
            "by_state": Counter(each.state for each in statuses),
            "requests": sum(each.num_requests for each in statuses),
            "predictions": predictions,
            "shown": [
                self._row(each, caches[each.id], audited.get(each.id, {}))
                | _loss_fields(losses.get(each.id, NO_LOSS))
                for each in shown
            ],
            "unserved": self._unserved(),
            "missing": [{"name": name, "reason": why} for name, why in missing.items()],
            "num_missing": len(self._waiting),
        }

    def _unserved(self) -> list[dict[str, str]]:
        """List models that no replica takes requests for, whatever the reason."""
        unserved = self._fleet.offers.unserved(time.monotonic())
        return [{"model": model, "reason": why} for model, why in islice(unserved, MAX_ROWS)]

    def _row(
        self, status: CandidateStatus, cache: str, audited: Mapping[str, float]
    ) -> dict[str, Any]:
        name = status.id
        replica = self._fleet.members.replica(status.replica)
        conversations, capacity = self._fleet.conversations, self._fleet.load.capacity_tokens(name)
        num_blocks = self._caches.index.num_blocks(name, "gpu")
        return {
            "name": name,
            "model": replica.base_model,
            "role": replica.role,
            "state": status.state,
            "reason": status.reason,
            "cache": cache,
            "publishes": replica.publishes_events,
            "cache_reason": self._caches.state_and_reason(name)[1],
            "requests": status.num_requests,
            "waiting": status.num_waiting,
            "queue_ms": round(status.queue_ms, 1),
            "busy": round(status.busy_ratio, 3),
            "sessions": conversations.at(name).num_sessions,
            "live_fill": _ratio(conversations.num_tokens_at(name), capacity),
            "cache_fill": _ratio(num_blocks, replica.num_blocks),
            "cache_blocks": num_blocks,
            "cpu_blocks": self._caches.index.num_blocks(name, "cpu"),
            "right": sum(audited.get(result, 0.0) for result in _RIGHT),
            "audited": sum(audited.values()),
        }

    def _audited(
        self, wanted: set[CandidateId]
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Count the audited predictions by result: of some candidates, and of all together."""
        found: dict[str, dict[str, float]] = {}
        sums: dict[str, float] = {}
        for (name, result), number in self._metrics.audit.values().items():
            sums[result] = sums.get(result, 0.0) + number
            if name in wanted:
                found.setdefault(name, {})[result] = number
        return found, sums


def _loss_fields(loss: CandidateLoss) -> dict[str, Any]:
    return {"loss_tokens": loss.num_tokens, "loss_s": loss.compute_s}


def _urgency(cache: str, status: CandidateStatus) -> tuple[bool, bool, float, int]:
    return status.state != "up", cache != "exact", status.queue_ms, status.num_requests


def _ratio(number: float, whole: int | None) -> float | None:
    return round(number / whole, 4) if whole else None
