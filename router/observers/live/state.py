"""The state of the router as one line of the live feed, described at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any, Final

import msgspec

from router.discovery.status import Status, Waiting
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.observers.live.degraded import degraded
from router.replicas.candidate_state import CandidateStatus
from router.replicas.fleet import Fleet
from router.request.queue import WaitingRoom
from router.scheduling.conversations import Conversations
from router.tenants import Tenants
from router.tokens import Prompters

FRESH_S: Final = 0.9

MAX_ROWS: Final = 50
"""Replicas that are described, those in trouble and with the longest queues first; all count."""

_RIGHT: Final = ("exact", "evicted")  # when the prediction was made

MAX_WAITING: Final = 20
MAX_TENANTS: Final = 20

Section = Callable[[], Any]


class LiveState:
    """Describes the router by sections, once for all who ask at the same time."""

    def __init__(self, sections: Mapping[str, Section]) -> None:
        self._sections = sections
        self._line = b""
        self._made_s = -FRESH_S

    async def line(self, now_s: float) -> bytes:
        """Return the state as JSON; requests have their turn between the sections."""
        if now_s - self._made_s >= FRESH_S:
            fields: dict[str, Any] = {"kind": "state", "at": round(time.time(), 3)}
            for name, section in self._sections.items():
                fields[name] = section()  # 1,000 replicas: 5 ms
                await asyncio.sleep(0)
            fields["degraded"] = degraded(fields)
            self._line = msgspec.json.encode(fields)
            self._made_s = now_s
        return self._line


def replica_fields(
    status: Status, fleet: Fleet, caches: CacheView, waiting: Waiting, metrics: Metrics
) -> dict[str, Any]:
    """Count the replicas by state, and describe the first `MAX_ROWS`, a row for each rank."""
    loads = status.loads()
    states = {each.id: caches.state(each.id) for each in loads}
    shown: Sequence[CandidateStatus] = loads
    if len(loads) > MAX_ROWS:
        shown = nlargest(MAX_ROWS, loads, key=lambda each: _urgency(states[each.id], each))
    predictions, audited, right = (defaultdict[str, float](float) for _ in range(3))
    for (name, result), number in metrics.audit.values().items():
        predictions[result] += number
        audited[name] += number
        right[name] += number if result in _RIGHT else 0
    unserved = fleet.offers.unserved(time.monotonic())
    return {
        "total": len(loads),
        "by_cache": Counter(states.values()),
        "by_state": Counter(each.state for each in loads),
        "requests": sum(each.num_requests for each in loads),
        "predictions": predictions,
        "shown": [
            status.candidate(each) | {"right": right[each.id], "audited": audited[each.id]}
            for each in shown
        ],
        "unserved": [{"model": model, "reason": why} for model, why in islice(unserved, MAX_ROWS)],
        "missing": [
            {"name": name, "reason": why} for name, why in islice(waiting.items(), MAX_ROWS)
        ],
        "num_missing": len(waiting),
    }


def _urgency(cache: str, load: CandidateStatus) -> tuple[bool, bool, float, int]:
    return load.state != "up", cache != "exact", load.queue_ms, load.num_requests


def queue_fields(room: WaitingRoom, conversations: Conversations, *, is_on: bool) -> dict[str, Any]:
    """Describe the queue, the requests that have waited for longest, and who has room."""
    at = conversations.at
    now_s = time.monotonic()
    return {
        "on": is_on,
        "waiting": room.num_waiting,
        "longest_s": round(max((now_s - each.since_s for each, _ in room), default=0.0), 1),
        "batch": sum(waiting.is_batch for waiting, _ in room),
        "for": Counter([room.held_by(waiting) or "its turn" for waiting, _ in room]),
        "shown": [room.describe(waiting) for waiting, _ in islice(room, MAX_WAITING)],
        "held_tokens": {each: at(each).num_tokens for each in conversations.rooms()},
    }


def tokenizer_fields(fleet: Fleet, prompters: Prompters) -> list[dict[str, str]]:
    """Describe the models whose prompts have no tokens here, or others than a replica's."""
    bases = (m.id for replica in fleet.members.replicas for m in replica.models if m.parent is None)
    return [
        {"model": model, "reason": why}
        for model in dict.fromkeys(bases)
        for why in _why_not_tokenized(model, prompters)
    ]


def _why_not_tokenized(model: str, prompters: Prompters) -> Iterator[str]:
    prompter = prompters.get(model)
    if prompter is None:
        if model in prompters.loading():
            yield "it is being loaded; until then prompts are routed without their tokens"
    elif prompter.engine_only is not None:
        yield f"it cannot be used, so the engine tokenizes each prompt: {prompter.engine_only}"
    else:
        for replica, what in prompter.trust.differences():
            yield f"its token ids differ from those of {replica}: {what}"


def tenant_fields(tenants: Tenants | None, metrics: Metrics) -> dict[str, Any] | None:
    """Describe the tenants that had the most tokens computed; None: there is no tenants file."""
    if tenants is None:
        return None
    rows: dict[str, dict[str, float]] = {}
    for (label, _), number in metrics.tenant_requests.values().items():
        _add(rows, label, "requests", number)
    for (label, kind), number in metrics.tenant_tokens.values().items():
        _add(rows, label, kind, number)
    for (label,), seconds in metrics.tenant_waits.values().items():
        _add(rows, label, "waited_s", round(seconds, 1))
    top = nlargest(MAX_TENANTS, rows.items(), key=lambda pair: pair[1].get("uncached", 0.0))
    return {"total": len(tenants), "shown": [{"name": label, **row} for label, row in top]}


def _add(rows: dict[str, dict[str, float]], label: str, name: str, number: float) -> None:
    row = rows.setdefault(label, {})
    row[name] = row.get(name, 0.0) + number
