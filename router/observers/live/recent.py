"""What the live page shows of recent requests: their lines, and the figures of the last minutes.

A line has no prompt text. A `Feed` has finished requests for those who watch. A slow listener loses
the oldest, which is counted.

Figures: how many requests, failures by reason, times to first token. Tokens by cause are sampled
from the counters of /metrics.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nsmallest
from itertools import pairwise
from time import monotonic
from typing import Any, Final

from msgspec import Struct, field

from policies.cost import costs_of
from policies.view import NOTHING_HELD, Holding
from router.base.bounded import Backlog, Bounded
from router.base.errors import Overloaded
from router.metrics import Metrics
from router.records.record import (
    CAUSE_WORDS,
    CAUSES,
    DecisionRecord,
    Outcome,
    advice_for,
    advice_in_words,
    causes_in_words,
)
from router.request.observer import Facts, Observer

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


WINDOW_S: Final = 60
_MOST_TIMES: Final = 1_000  # of each second; of more, the first
_MOST_IDS: Final = 10_000
_MOST_REASONS: Final = 5
_OF_OTHERS: Final = frozenset(
    {"unknown_route", "method_not_allowed", "invalid_api_key", Outcome.CLIENT_GONE.value}
)
"""Ends that say nothing of the service: a scanner's, or of a client that left."""


class _Second(Struct):
    number: int
    num_requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)


class RecentRequests(Observer):
    """Counts requests by the second in which they ended. A client that left is no failure."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)
        self._counted: Bounded[str, None] = Bounded(_MOST_IDS)  # ended; some are refused, too

    def ended(self, facts: Facts) -> None:
        self._counted.put(facts.read.request_id, None)
        now = self._now()
        now.num_requests += 1
        if facts.first_s is not None and len(now.ttft_s) < _MOST_TIMES:
            now.ttft_s.append(facts.first_s - facts.read.inbound.arrived_s)
        if facts.outcome not in (Outcome.OK, Outcome.CLIENT_GONE):
            at = f" from {facts.placement.replica}" if facts.placement is not None else ""
            what = str(facts.status) if facts.status >= 400 else facts.outcome.value
            now.failures[what + at] += 1

    def refused(self, request_id: str, code: str) -> None:
        if code in _OF_OTHERS or self._counted.pop(request_id, self) is None:
            return
        now = self._now()
        now.num_requests += 1
        now.failures[code] += 1

    def describe(self) -> dict[str, Any]:
        """Return the figures of the last minute; times in seconds, None where there was none."""
        oldest = int(monotonic()) - WINDOW_S
        seconds = [each for each in self._seconds if each.number > oldest]
        num = sum(each.num_requests for each in seconds)
        failures: Counter[str] = sum((each.failures for each in seconds), Counter())
        times = sorted(time for each in seconds for time in each.ttft_s)
        return {
            "window_s": WINDOW_S,
            "requests": num,
            "failed": sum(failures.values()),
            "failures": [list(each) for each in failures.most_common(_MOST_REASONS)],
            "ttft_p50_s": _at(times, 0.5),
            "ttft_p99_s": _at(times, 0.99),
        }

    def _now(self) -> _Second:
        number = int(monotonic())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]


def _at(times: list[float], share: float) -> float | None:
    return round(times[min(len(times) - 1, int(share * len(times)))], 3) if times else None


STEP_S: Final = 10.0
NUM_STEPS: Final = 60

COLUMNS: Final = ("cached", *CAUSES)

_ADVICE: Final = {cause: advice_for(cause) for cause in CAUSES}


class TrafficHistory:
    """Sums every 10 s, for 10 minutes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        begin = time.time(), self.totals()
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque([begin], maxlen=NUM_STEPS + 1)
        self._due_s = time.monotonic() + STEP_S

    def sweep(self, now_s: float) -> None:
        """Record a sample if it is time."""
        if now_s >= self._due_s:
            self._due_s = now_s + STEP_S
            self._samples.append((time.time(), self.totals()))

    def totals(self) -> tuple[int, ...]:
        """Return the tokens of each of `COLUMNS` since the router began."""
        counted = self._metrics.prompt_tokens.values()
        return tuple([int(counted.get((name,), 0.0)) for name in COLUMNS])

    def describe(self) -> dict[str, Any]:
        """Return totals, and what each step added: `[unix seconds at its end, tokens...]`."""
        samples = [*self._samples, (time.time(), self.totals())]
        steps = [
            [round(at), *[n - m for n, m in zip(after, before, strict=True)]]
            for (_, before), (at, after) in pairwise(samples)
        ]
        return {
            "columns": COLUMNS,
            "words": CAUSE_WORDS,
            "advice": _ADVICE,
            "totals": samples[-1][1],
            "step_s": STEP_S,
            "steps": steps,
        }
