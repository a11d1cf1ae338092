"""The data port: what clients talk to. Routes, bodies in, answers out, errors as JSON.

No routing here: a request becomes an `Inbound`, which router.request.story answers. The
router's own pages are in router.http.pages, and observers may add routes (router.http.pages);
router.api.routes says which routes go to engines.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from router.api.answers import error_event
from router.api.apis import api_of
from router.api.routes import Route, loggable, path_of, shown
from router.base.errors import (
    BadRequest,
    ClientError,
    MethodNotAllowed,
    RouterError,
    ShuttingDown,
    UnknownRoute,
)
from router.discovery.readiness import Readiness
from router.http.exchange import (
    Access,
    Exchange,
    HeldBody,
    Intake,
    InternalError,
    error_answer,
    page_headers,
    preflight,
    request_ids,
    without_message,
)
from router.http.pages import PING, Asked, OwnRoutes, Pages
from router.http.server import Draining
from router.metrics import Metrics
from router.request.results import Inbound
from router.request.story import Story

logger = logging.getLogger(__name__)

_READS: Final = ("GET", "HEAD")
_POSTED: Final = ("POST", PING)


class DataApp:
    """The handlers of the data port."""

    def __init__(
        self,
        *,
        story: Story,
        pages: Pages,
        intake: Intake,
        access: Access,
        readiness: Readiness,
        draining: Draining,
        metrics: Metrics,
        own_routes: OwnRoutes,
    ) -> None:
        self._own_routes = own_routes
        self._story = story
        self.pages = pages
        self._intake = intake
        self._access = access
        self._readiness = readiness
        self._draining = draining
        self._metrics = metrics
        self._ids = request_ids()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the public port."""
        if (answer := await self._own(request)) is not None:
            answer.headers.update(page_headers(request.headers))
            return answer
        client = self._access.client(request)
        exchange = Exchange(request, client, self._ids)
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                raise UnknownRoute(
                    "WebSockets are not served here; route them to a replica, in the proxy in "
                    "front of the router"
                )
            route = self._route(request)
            if route.path == "/v1/models" and request.method in _READS:
                answer = await self.pages.models(request)  # with a slash at its end
                answer.headers.update(exchange.own_headers)
                return answer
            caller = exchange.caller = self._access.caller(request)
            serve, in_flight = self._answer, caller.in_flight
            if route.path in self._own_routes:
                serve, in_flight = self._answer_own, None  # no engine computes for it
            # The caller before its body: a client that may not ask costs nothing.
            if in_flight is not None:
                in_flight.enter()
            try:
                with self._intake.hold() as held:
                    await self._draining.until_cut(serve(exchange, route, held))
            finally:
                if in_flight is not None:
                    in_flight.leave()
        except ShuttingDown as error:
            await exchange.cut(error)
            return self._failed(exchange, error)
        except RouterError as error:
            return self._failed(exchange, error)
        except ConnectionError:
            return exchange.abort()
        except Exception as exc:
            fields = {"request": exchange.request_id}
            logger.error("internal error", extra=fields, exc_info=without_message(exc))
            message = f"internal error; see the router's log for {exchange.request_id}"
            return self._failed(exchange, InternalError(message))
        assert exchange.response is not None
        return exchange.response

    async def _own(self, request: web.BaseRequest) -> web.StreamResponse | None:
        """Answer what no engine and no key is needed for; None: it is another request."""
        if request.method == "OPTIONS":
            return preflight(request)
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            error = BadRequest("Expect must be 100-continue", param="Expect")
            return error_answer(error, request.path)
        is_read = request.method in _READS or (request.method, request.path) == _POSTED
        page = self.pages.find(request.path) if is_read else None
        if page is None:
            return None
        return await page(request)

    def _route(self, request: web.BaseRequest) -> Route:
        """Find the route of a request.

        Raises:
            UnknownRoute, MethodNotAllowed: it is not served.
        """
        try:
            return self._access.route(request)
        except UnknownRoute:
            if self.pages.find(request.path) is None:
                raise
            message = f"{request.path[:200]!a} accepts GET, HEAD, not {request.method[:20]!a}"
            raise MethodNotAllowed(message, allowed="GET, HEAD, OPTIONS") from None

    async def _answer(self, exchange: Exchange, route: Route, held: HeldBody) -> None:
        """Receive a request and have it answered.

        Raises:
            RouterError: it is refused, or its answer broke off.
        """
        request = exchange.request
        body, as_sent = await held.receive(request, route, exchange.caller)
        query = request.raw_path.partition("?")[2]
        inbound = Inbound(
            api=api_of(request.method, route.path),
            method=request.method,
            path=route.path,
            target=f"{route.path}?{query}" if query else route.path,
            headers=request.headers,
            body=body,
            arrived_s=exchange.arrived_s,
            caller=exchange.caller,
            needs_json=route.takes == "json",
            needs_model=route.takes != "any" and request.method == "POST",
            as_sent=as_sent,
            client=exchange.client,
        )
        await self._readiness.until_started()
        await self._story.serve(inbound, exchange, exchange.request_id)

    async def _answer_own(self, exchange: Exchange, route: Route, held: HeldBody) -> None:
        """Receive a request for a route of the router's own, and answer it.

        Raises:
            RouterError: it is refused.
        """
        request = exchange.request
        if request.method != "POST":
            message = f"{route.path} takes POST, not {request.method[:20]!a}"
            raise MethodNotAllowed(message, allowed="POST, OPTIONS")
        body, _ = await held.receive(request, route, exchange.caller)
        asked = Asked(
            caller=exchange.caller, headers=request.headers, query=request.query, body=body
        )
        answer = json.dumps(await self._own_routes[route.path](asked)).encode()
        headers = CIMultiDict({"Content-Type": "application/json"})
        await exchange.send(200, headers, answer, is_own=True)

    def _failed(self, exchange: Exchange, error: RouterError) -> web.StreamResponse:
        """Answer an error, or cut the connection where an answer has begun."""
        caller = exchange.caller
        self._metrics.refused.labels(error.code).inc()
        self._story.steps.observers.refused(exchange.request_id, error.code)
        if caller.label is not None:
            self._metrics.tenant_requests.labels(caller.label, error.code).inc()
        response = exchange.response
        if response is not None and response.prepared:
            if exchange.is_early:
                with suppress(ConnectionError):
                    exchange.put(error_event(error, exchange.request.path))
            # A stream's client got an error event.
            return response if exchange.is_stream else exchange.abort()
        # A client error's message may quote the request (a template's does): not for the log.
        why = error.code if isinstance(error, ClientError) else error.message
        of_route = isinstance(error, UnknownRoute | MethodNotAllowed)
        request = exchange.request
        logger.warning(
            "refused",
            extra={
                "request": exchange.request_id,
                "tenant": caller.name,
                "client": exchange.client.address,
                "status": error.status,
                "why": why,
                "param": error.param,
                "method": shown(request.method) if of_route else None,
                "path": loggable(path_of(request.raw_path)) if of_route else None,
            },
        )
        return error_answer(error, exchange.request.path, exchange.own_headers)
