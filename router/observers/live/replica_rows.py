"""The replicas as the live page shows them: known caches, fullness, load, right predictions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from policies.view import CandidateId
from router.discovery.status import Status, Waiting
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet
from router.replicas.state import RankState

MAX_ROWS: Final = 50
"""More are counted only. Those in trouble and those with the longest queues are shown."""

_RIGHT: Final = ("exact", "evicted")  # when the prediction was made


class ReplicaRows:
    """Describes the replicas now, a row for each rank."""

    def __init__(
        self, status: Status, fleet: Fleet, caches: CacheView, waiting: Waiting, metrics: Metrics
    ) -> None:
        self._status = status
        self._offers = fleet.offers
        self._caches = caches
        self._waiting = waiting
        self._metrics = metrics

    def describe(self) -> dict[str, Any]:
        """Count all by state, and describe the first `MAX_ROWS`."""
        statuses = self._status.statuses()
        caches = {each.id: self._caches.state(each.id) for each in statuses}
        shown = [*statuses]
        if len(shown) > MAX_ROWS:
            shown = nlargest(MAX_ROWS, shown, key=lambda each: _urgency(caches[each.id], each))
        audited, predictions = self._audited({each.id for each in shown})
        missing = dict(list(self._waiting.items())[:MAX_ROWS])
        return {
            "total": len(statuses),
            "by_cache": Counter(caches.values()),
            "by_state": Counter(each.state for each in statuses),
            "requests": sum(each.num_requests for each in statuses),
            "predictions": predictions,
            "shown": [_row(self._status.rank(each), audited.get(each.id, {})) for each in shown],
            "unserved": self._unserved(),
            "missing": [{"name": name, "reason": why} for name, why in missing.items()],
            "num_missing": len(self._waiting),
        }

    def _unserved(self) -> list[dict[str, str]]:
        """List models that no replica takes requests for, whatever the reason."""
        unserved = self._offers.unserved(time.monotonic())
        return [{"model": model, "reason": why} for model, why in islice(unserved, MAX_ROWS)]

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


def _row(rank: RankState, audited: Mapping[str, float]) -> dict[str, Any]:
    status, replica = rank.status, rank.replica
    return {
        "name": status.id,
        "model": replica.base_model,
        "role": replica.role,
        "state": status.state,
        "reason": status.reason,
        "cache": rank.cache,
        "publishes": replica.publishes_events,
        "caches_prefixes": replica.caches_prefixes,
        "several": rank.has_several_engines,
        "cache_reason": rank.reason,
        "requests": status.num_requests,
        "waiting": status.num_waiting,
        "queue_ms": round(status.queue_ms, 1),
        "busy": round(status.busy_ratio, 3),
        "sessions": rank.num_sessions,
        "live_fill": _rounded(rank.footprint_ratio),
        "cache_fill": _rounded(rank.fill_ratio),
        "cache_blocks": rank.num_gpu_blocks,
        "cpu_blocks": rank.num_cpu_blocks,
        "right": sum(audited.get(result, 0.0) for result in _RIGHT),
        "audited": sum(audited.values()),
    }


def _urgency(cache: str, status: CandidateStatus) -> tuple[bool, bool, float, int]:
    return status.state != "up", cache != "exact", status.queue_ms, status.num_requests


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
