"""The observer that follows sampled requests."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from multidict import CIMultiDict

from router.observers.tracing.trace import Attempt, Trace
from router.records.outcome import Outcome
from router.request.observer import Facts, Observer
from router.request.plan import Placement
from router.request.record import record_of
from router.request.results import Prompt, Read

CURRENT: Final[ContextVar[Trace | None]] = ContextVar("trace", default=None)
"""The trace of the request that a task answers."""


class Tracing(Observer):
    """Writes down what becomes of followed requests, and tells engines their context.

    Args:
        on_close: Called when the router ends.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close

    def close(self) -> None:
        self._on_close()

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
        replica = placement.candidate.replica
        placement.slots[self] = trace.sent(
            headers, placement.lease.candidate, replica.url, replica.role, placement.placed_s
        )

    def released(self, placement: Placement, outcome: Outcome) -> None:
        attempt: Attempt | None = placement.slots.get(self)
        if attempt is not None:
            attempt.end(outcome.value)

    def ended(self, facts: Facts) -> None:
        trace: Trace | None = facts.read.inbound.slots.get(self)
        if trace is None:
            return
        trace.record, trace.usage = record_of(facts), facts.usage
        if trace.is_sampled:
            facts.notes["trace"] = f"{trace.trace_id:032x}"

    def settled(self, facts: Facts) -> None:
        trace: Trace | None = facts.read.inbound.slots.get(self)
        if trace is not None:
            trace.record = record_of(facts)
