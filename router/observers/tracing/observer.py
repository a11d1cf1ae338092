"""The observer that follows requests."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from router.observers.tracing.spans import finish
from router.observers.tracing.trace import MOST_TRIES, STATE, Attempt, Trace
from router.records.outcome import Outcome
from router.request.observer import Facts, Observer
from router.request.plan import Placement
from router.request.record import record_of
from router.request.results import Prompt, Read

if TYPE_CHECKING:
    from router.observers.tracing.otlp import Spans

CURRENT: Final[ContextVar[Trace | None]] = ContextVar("trace", default=None)
"""The trace of the request that a task answers."""


class Tracing(Observer):
    """Begins and ends the spans of requests, and tells engines their context."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def close(self) -> None:
        self._spans.close()

    def read(self, read: Read) -> None:
        trace = CURRENT.get()
        if trace is not None:
            trace.streams = read.streams
            read.inbound.slots[self] = trace

    def refused(self, request_id: str, code: str) -> None:
        trace = CURRENT.get()
        if trace is not None:
            trace.error = code

    def sent(self, prompt: Prompt, placement: Placement, headers: CIMultiDict[str]) -> None:
        trace: Trace | None = prompt.read.inbound.slots.get(self)
        if trace is None:
            return
        before: Attempt | None = placement.slots.get(self)
        if before is not None:
            before.end("replaced")
        span, now_s = trace.span, time.monotonic()
        if span.is_recording() and len(trace.attempts) < MOST_TRIES:
            span = self._spans.below(trace, trace.at_ns(now_s))
            replica, decided_s = placement.candidate.replica, placement.placed_s
            id_ = placement.lease.candidate
            attempt = Attempt(span, id_, replica.url, replica.role, decided_s, now_s)
            placement.slots[self] = attempt
            trace.attempts.append(attempt)
        if not trace.is_joined:
            headers.popall(STATE, None)  # of the client's trace, which ends here
        self._spans.write(span, headers)

    def released(self, placement: Placement, outcome: Outcome) -> None:
        attempt: Attempt | None = placement.slots.get(self)
        if attempt is not None:
            attempt.end(outcome.value)

    def ended(self, facts: Facts) -> None:
        trace: Trace | None = facts.read.inbound.slots.get(self)
        if trace is not None and trace.span.is_recording():
            trace.is_awaited = True
            facts.notes["trace"] = f"{trace.span.get_span_context().trace_id:032x}"

    def settled(self, facts: Facts) -> None:
        trace: Trace | None = facts.read.inbound.slots.get(self)
        if trace is None or not trace.is_awaited:
            return
        trace.record, trace.usage, trace.is_awaited = record_of(facts), facts.usage, False
        if trace.ended_s is not None:
            finish(trace)
