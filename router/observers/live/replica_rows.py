"""The replicas as the live page shows them: known caches, fullness, load, right predictions."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from router.discovery.status import Status, Waiting
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet

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
        loads = self._status.loads()
        caches = {each.id: self._caches.state(each.id) for each in loads}
        shown = [*loads]
        if len(shown) > MAX_ROWS:
            shown = nlargest(MAX_ROWS, shown, key=lambda each: _urgency(caches[each.id], each))
        predictions, audited, right = (defaultdict[str, float](float) for _ in range(3))
        for (name, result), number in self._metrics.audit.values().items():
            predictions[result] += number
            audited[name] += number
            right[name] += number if result in _RIGHT else 0
        missing = dict(list(self._waiting.items())[:MAX_ROWS])
        return {
            "total": len(loads),
            "by_cache": Counter(caches.values()),
            "by_state": Counter(each.state for each in loads),
            "requests": sum(each.num_requests for each in loads),
            "predictions": predictions,
            "shown": [
                self._status.candidate(each)
                | {"right": right[each.id], "audited": audited[each.id]}
                for each in shown
            ],
            "unserved": self._unserved(),
            "missing": [{"name": name, "reason": why} for name, why in missing.items()],
            "num_missing": len(self._waiting),
        }

    def _unserved(self) -> list[dict[str, str]]:
        """List models that no replica takes requests for, whatever the reason."""
        unserved = self._offers.unserved(time.monotonic())
        return [{"model": model, "reason": why} for model, why in islice(unserved, MAX_ROWS)]


def _urgency(cache: str, status: CandidateStatus) -> tuple[bool, bool, float, int]:
    return status.state != "up", cache != "exact", status.queue_ms, status.num_requests
