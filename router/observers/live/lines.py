"""A finished request as a line of the live feed. It has no prompt text.

A `Feed` has finished requests for those who watch. A slow listener loses the oldest, which is
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nsmallest
from typing import Any, Final

from policies.cost import costs_of
from policies.view import NOTHING_HELD, Holding
from router.base.bounded import Backlog
from router.base.errors import Overloaded
from router.records.record import DecisionRecord, advice_in_words, causes_in_words
from router.request.observer import Observer

MAX_COSTS: Final = 16
"""Candidates of a line, the best ones; `num_costs` counts all."""


def decision_line(record: DecisionRecord) -> dict[str, Any]:
    """Describe a finished request; times in milliseconds, `at` in unix seconds when it ended."""
    chosen, computed = record.decision.candidate, record.computed
    assignment, prefill = record.assignment, record.prefill
    return {
        "kind": "decision",
        "request": record.request_id,
        "at": round(record.at, 3),
        "api": record.api,
        "session": record.session,
        "tenant": record.tenant,
        "model": record.model,
        "replica": chosen,
        "policy": record.policy,
        "reason": record.decision.reason,
        "state": record.state,
        "outcome": record.outcome,
        "status": record.status,
        "tokens": record.num_prompt_tokens,
        "cached": record.num_predicted_cached_tokens,
        "reported": record.num_reported_cached_tokens,
        "output_tokens": record.num_completion_tokens,
        "sources": _sources(record),
        "causes": computed.tokens if computed is not None else None,
        "text": causes_in_words(computed) if computed is not None else [],
        "advice": advice_in_words(computed) if computed is not None else [],
        "class": record.service_class,
        "router_ms": round(record.router_ms, 2),
        "waited_ms": round(record.waited_ms, 1),
        "waited_for": record.waited_for,
        "ttft_ms": _rounded(record.ttft_ms),
        "predicted_ttft_ms": _rounded(record.predicted_ttft_ms),
        "total_ms": round(record.total_ms, 1),
        "tries": [{"replica": each.candidate, "failure": each.failure} for each in record.tries],
        "experiment": assignment.label if assignment is not None else None,
        "prefill": prefill.where if prefill is not None else None,
        "num_costs": len(record.snapshot.replicas),
        "costs": list(_costs(record)),
    }


def _sources(record: DecisionRecord) -> dict[str, int]:
    """Split the prompt by where its tokens came from; what the engine reports has precedence."""
    chosen = record.decision.candidate
    views = (view for view in record.snapshot.replicas if view.id == chosen)
    held: Holding = next(views, NOTHING_HELD)
    reported = record.num_reported_cached_tokens
    num_cached = record.num_predicted_cached_tokens if reported is None else reported
    num_gpu, num_cpu, num_pool = held.sources(num_cached)
    return {
        "gpu": num_gpu,
        "cpu": num_cpu,
        "pool": num_pool,
        "computed": max(0, record.num_prompt_tokens - num_cached),
    }


def _costs(record: DecisionRecord) -> Iterator[dict[str, Any]]:
    """Describe the candidates with the lowest costs, and the chosen one."""
    chosen, views = record.decision.candidate, record.snapshot.replicas
    pairs = list(zip(costs_of(record.decision, record.snapshot), views, strict=True))
    best = nsmallest(MAX_COSTS, pairs, key=lambda pair: pair[0].total_ms)
    if all(cost.id != chosen for cost, _ in best):
        best += [pair for pair in pairs if pair[0].id == chosen]
    for cost, view in best:
        yield {
            "replica": cost.id,
            "chosen": cost.id == chosen,
            "uncached": cost.num_uncached_tokens,
            "gpu": view.num_gpu_tokens,
            "cpu": view.num_cpu_only_tokens,
            "pool": view.num_fetched_tokens,
            "requests": view.num_requests,
            "queue_ms": round(cost.queue_ms, 1),
            "fetch_ms": round(cost.fetch_ms, 1),
            "prefill_ms": round(cost.prefill_ms, 1),
            "others_ms": round(cost.others_ms, 1),
            "total_ms": round(cost.total_ms, 1),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


MAX_LISTENERS: Final = 16

NUM_LAST: Final = 20
"""Requests that are kept for those who begin to listen."""


class Feed(Observer):
    """Hands each finished request to the listeners. Call from one thread."""

    def __init__(self) -> None:
        self._listeners: list[Backlog[DecisionRecord]] = []  # what each has not taken yet
        self._last: deque[DecisionRecord] = deque(maxlen=NUM_LAST)

    def __len__(self) -> int:
        """Count the listeners."""
        return len(self._listeners)

    def recorded(self, record: DecisionRecord) -> None:
        """Hand out a record."""
        self._last.append(record)
        for listener in self._listeners:
            listener.push(record)

    @contextmanager
    def subscribe(self, max_waiting: int, num_last: int = 0) -> Iterator[Backlog[DecisionRecord]]:
        """Listen within the block.

        Args:
            max_waiting: Records that wait for the listener at most.
            num_last: Records of before that it gets first.

        Raises:
            Overloaded: too many listen already.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listeners follow the live feed; that is the limit")
        listener: Backlog[DecisionRecord] = Backlog(max_waiting)
        listener.extend(list(self._last)[max(0, len(self._last) - num_last) :])
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
