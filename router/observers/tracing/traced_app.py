"""Traces of the public port's requests: what begins and ends them.

Only a router that has `tracing.endpoint` wraps its handler so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from router.api.routes import loggable
from router.base.errors import RouterError
from router.http.access import Access
from router.http.connection import Handler
from router.http.pages import Pages
from router.observers.tracing.observer import CURRENT
from router.observers.tracing.spans import finish
from router.observers.tracing.trace import Trace

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
