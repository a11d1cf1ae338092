"""The traces of the public port's requests: what begins and ends them, and what follows them.

Only a router that has `tracing.endpoint` wraps its handler so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from aiohttp import web
from multidict import CIMultiDict

from router.api.routes import loggable
from router.base.errors import RouterError
from router.http.exchange import Access
from router.http.pages import Pages
from router.http.server import Handler
from router.observers.tracing.spans import MOST_TRIES, STATE, Attempt, Trace, finish
from router.records.record import Outcome
from router.request.observer import Facts, Observer
from router.request.record import record_of
from router.request.results import Placement, Prompt, Read

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


_READS: Final = ("GET", "HEAD")
_CLIENT_LEFT: Final = 499


class TracedApp:
    """Answers requests by another handler, and has them traced; the router's own pages are not."""

    def __init__(
        self,
        answer: Handler,
        begin: Callable[[Mapping[str, str], str], Trace | None],
        pages: Pages,
        access: Access,
    ) -> None:
        self._answer = answer
        self._begin = begin
        self._pages = pages
        self._access = access

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        trace = None if self._is_own(request) else self._begin(request.headers, request.method)
        if trace is None:
            return await self._answer(request)
        trace.route = self._route_of(request)
        CURRENT.set(trace)
        try:
            answer = await self._answer(request)
            trace.status = answer.status if answer.status != _CLIENT_LEFT else None
            return answer
        finally:
            CURRENT.set(None)
            trace.ended_s = time.monotonic()
            if not trace.is_awaited:
                finish(trace)

    def _route_of(self, request: web.BaseRequest) -> str | None:
        """Return the route of a request as it may be shown. None: it is for no route."""
        try:
            return loggable(self._access.route(request).path)
        except RouterError:
            return None

    def _is_own(self, request: web.BaseRequest) -> bool:
        if request.method == "OPTIONS":
            return True
        return request.method in _READS and self._pages.find(request.path) is not None
