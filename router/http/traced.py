"""Traces of the public port's requests: what begins and ends them.

Only a router that has `tracing.endpoint` wraps its handler so.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from router.api.routes import Route, loggable
from router.http.connection import Handler
from router.http.pages import Pages
from router.tracing.trace import Trace, Tracer

_TRACE: Final = web.RequestKey("trace", Trace)
_READS: Final = ("GET", "HEAD")
_CLIENT_LEFT: Final = 499


class TracedApp:
    """Answers requests by another handler, and has them traced; the router's own pages are not."""

    def __init__(self, answer: Handler, tracer: Tracer, pages: Pages) -> None:
        self._answer = answer
        self._tracer = tracer
        self._pages = pages

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        trace = None if self._is_own(request) else self._begin(request)
        if trace is None:
            return await self._answer(request)
        request[_TRACE] = trace
        status = None
        try:
            answer = await self._answer(request)
            status = answer.status if answer.status != _CLIENT_LEFT else None
            return answer
        finally:
            self._tracer.end(trace, status)

    def _begin(self, request: web.BaseRequest) -> Trace | None:
        return self._tracer.begin(request.headers, request.method)

    def _is_own(self, request: web.BaseRequest) -> bool:
        if request.method == "OPTIONS":
            return True
        return request.method in _READS and self._pages.find(request.path) is not None


def trace_of(request: web.BaseRequest, route: Route) -> Trace | None:
    """Return the trace of a request that is for a route. None: it is not traced."""
    trace = request.get(_TRACE)
    if trace is not None:
        trace.route = loggable(route.path)
    return trace


def failed(request: web.BaseRequest, code: str) -> None:
    """Note the error that a request ended with."""
    trace = request.get(_TRACE)
    if trace is not None:
        trace.error = code
