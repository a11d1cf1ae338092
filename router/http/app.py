"""The data port: what clients talk to. Routes, bodies in, answers out, errors as JSON.

No routing here: a request becomes an `Inbound`, which router.request.story answers. The
router's own pages are /healthz, /readyz, /metrics, /v1/models and its entries; router.api.routes
says which routes go to engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import Struct

from router.api.apis import REALTIME, api_of
from router.api.clients import Clients
from router.api.encodings import AsSent, decoded, utf8
from router.api.failures import error_event
from router.api.forms import SMALL_BYTES
from router.api.routes import Route, Routes, loggable, shown
from router.api.withheld import Withheld
from router.config import LimitsConfig
from router.discovery.readiness import Readiness
from router.errors import (
    BadRequest,
    ClientError,
    MethodNotAllowed,
    NoReplicaAvailable,
    OriginRefused,
    RouterError,
    ShuttingDown,
    UnknownModel,
    UnknownRoute,
)
from router.http.answers import InternalError, error_answer, metrics_answer, without_message
from router.http.connection import Handler
from router.http.cors import Origins
from router.http.draining import Draining
from router.http.exchange import Exchange, request_ids
from router.http.framing import expected
from router.http.guard import is_of_another_page
from router.http.intake import HeldBody, Intake
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.request.realtime import Realtime
from router.request.results import Inbound
from router.request.story import Story
from router.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)

_READS: Final = ("GET", "HEAD")
_MODEL: Final = "/v1/models/"
_START_S: Final = 5.0  # after a router began, requests wait at most until then
_START_LOOK_S: Final = 0.02


class Entrance(Struct, frozen=True, kw_only=True):
    """The rules for requests: which routes are served, and to whom.

    tenants: None: clients are not distinguished.
    """

    routes: Routes
    clients: Clients
    origins: Origins
    withheld: Withheld
    tenants: Tenants | None


class DataApp:
    """The handlers of the data port."""

    def __init__(
        self,
        *,
        story: Story,
        realtime: Realtime,
        fleet: Fleet,
        metrics: Metrics,
        limits: LimitsConfig,
        entrance: Entrance,
        readiness: Readiness,
        draining: Draining,
    ) -> None:
        self._story = story
        self._realtime = realtime
        self._fleet = fleet
        self._metrics = metrics
        self._limits = limits
        self._intake = Intake(limits, metrics)
        self._routes = entrance.routes
        self._clients = entrance.clients
        self._origins = entrance.origins
        self._withheld = entrance.withheld
        self._readiness = readiness
        self._tenants = entrance.tenants
        self._draining = draining
        self._pages: dict[str, Handler] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
            "/v1/models": self._models,
        }
        self._ids = request_ids()
        self._may_wait_until_s = time.monotonic() + _START_S

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the public port."""
        if (answer := await self._own(request)) is not None:
            answer.headers.update(self._origins.headers(request.headers))
            return answer
        client = self._clients.find(request.remote, request.headers, request.scheme)
        exchange = Exchange(request, client, self._ids, self._origins)
        try:
            is_socket = request.headers.get("Upgrade", "").lower() == "websocket"
            route = self._route(request)
            if is_socket != (route.takes == "socket"):
                what = "not a WebSocket; use HTTP" if is_socket else "a WebSocket: send Upgrade"
                raise BadRequest(f"{route.path} is {what}", param="Upgrade")
            if route.path == "/v1/models" and request.method in _READS:
                answer = await self._models(request)  # with a slash at its end
                answer.headers.update(exchange.own_headers)
                return answer
            tenant = exchange.tenant = self._tenant(request)
            serve = self._connect if is_socket else self._answer
            # The tenant before its body: a client that may not ask costs nothing.
            if tenant is not None:
                tenant.account.enter(time.monotonic())
            try:
                with self._intake.hold() as held:
                    await self._draining.until_cut(serve(exchange, route, held))
            finally:
                if tenant is not None:
                    tenant.account.leave()
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
            return self._origins.preflight(request)
        if "Expect" in request.headers and (refusal := expected(request)) is not None:
            return refusal
        page = self._page(request.path) if request.method in _READS else None
        if page is None:
            return None
        return await page(request)

    def _route(self, request: web.BaseRequest) -> Route:
        """Find the route of a request.

        Raises:
            UnknownRoute, MethodNotAllowed: it is not served.
        """
        try:
            return self._routes.find(request.method, request.raw_path.partition("?")[0])
        except UnknownRoute:
            if self._page(request.path) is None:
                raise
            message = f"{request.path[:200]!a} accepts GET, HEAD, not {request.method[:20]!a}"
            raise MethodNotAllowed(message, allowed="GET, HEAD, OPTIONS") from None

    def _page(self, path: str) -> Handler | None:
        """Find a page of the router's own."""
        if path.startswith(_MODEL):
            return self._model if path != _MODEL else None
        return self._pages.get(path)

    async def _answer(self, exchange: Exchange, route: Route, held: HeldBody) -> None:
        """Receive a request and have it answered.

        Raises:
            RouterError: it is refused, or its answer broke off.
        """
        inbound = await self._receive(exchange, route, held)
        await self._until_started()
        await self._story.serve(inbound, exchange, exchange.request_id)

    async def _connect(self, exchange: Exchange, route: Route, held: HeldBody) -> None:
        """Serve a WebSocket.

        Raises:
            RouterError: it is refused, before the upgrade.
        """
        if self._draining.reason is not None:
            raise ShuttingDown("the router is shutting down; connect again")
        request = exchange.request
        if exchange.tenant is None and is_of_another_page(request):
            raise OriginRefused("web pages of other origins may not connect", param="Origin")
        query = request.raw_path.partition("?")[2]
        inbound = Inbound(
            api=REALTIME,
            method="GET",
            path=route.path,
            target=f"{route.path}?{query}" if query else route.path,
            headers=request.headers,
            body=None,
            arrived_s=exchange.arrived_s,
            tenant=exchange.tenant,
            client=exchange.client,
        )
        await self._until_started()
        max_bytes = self._limits.websocket_message_bytes
        await self._realtime.serve(
            inbound,
            exchange.request_id,
            lambda headers: exchange.upgrade(headers, max_bytes),
            held,
        )

    async def _receive(self, exchange: Exchange, route: Route, held: HeldBody) -> Inbound:
        """Read the body, and decode it where the router has to look into it.

        Raises:
            ClientError, Overloaded: it cannot be read, or is not wanted.
        """
        request, tenant = exchange.request, exchange.tenant
        own_limit = tenant.body_bytes if tenant is not None else None
        body = await held.read(request, own_limit)
        as_sent = None
        if body and route.takes != "any":
            view = await self._readable(request, route, body)
            if view is not body:
                held.count(len(view))
                as_sent = AsSent(body, view)
                body = view
        query = request.raw_path.partition("?")[2]
        return Inbound(
            api=api_of(request.method, route.path),
            method=request.method,
            path=route.path,
            target=f"{route.path}?{query}" if query else route.path,
            headers=request.headers,
            body=body,
            arrived_s=exchange.arrived_s,
            tenant=tenant,
            needs_json=route.takes == "json",
            needs_model=route.takes != "any" and request.method == "POST",
            as_sent=as_sent,
            client=exchange.client,
        )

    async def _readable(self, request: web.BaseRequest, route: Route, body: bytes) -> bytes:
        """Decode a body; `body` itself, if it is plain. A form is checked.

        Raises:
            ClientError: it is not what it says, or has what clients must not send.
        """
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            body = await asyncio.to_thread(decoded, body, encoding, self._limits.body_bytes)
        if route.takes == "json":
            return utf8(body)
        kind = request.headers.get("Content-Type", "")
        if len(body) <= SMALL_BYTES:
            self._withheld.check_form(body, kind)
        else:
            await asyncio.to_thread(self._withheld.check_form, body, kind)
        return body

    def _tenant(self, request: web.BaseRequest) -> Tenant | None:
        """Find whose request it is; None: clients are not told apart.

        Raises:
            Unauthorized: its key is missing or unknown.
        """
        return self._tenants.authenticate(request.headers) if self._tenants is not None else None

    async def _until_started(self) -> None:
        """Hold requests to a router that started a moment ago and is about to know its replicas.

        A client that retries after one was killed gets no 503 from its successor.
        """
        while time.monotonic() < self._may_wait_until_s:
            if not self._readiness.is_starting():
                break
            await asyncio.sleep(_START_LOOK_S)

    def _failed(self, exchange: Exchange, error: RouterError) -> web.StreamResponse:
        """Answer an error, or cut the connection where an answer has begun."""
        tenant = exchange.tenant
        self._metrics.refused.labels(error.code).inc()
        if tenant is not None:
            self._metrics.tenant_requests.labels(tenant.label, error.code).inc()
        response = exchange.response
        if response is not None and response.prepared:
            if exchange.is_early:
                with suppress(ConnectionError):
                    exchange.put(error_event(error, exchange.request.path))
            # A stream's client got an error event.
            return response if exchange.is_stream or exchange.is_socket else exchange.abort()
        # A client error's message may quote the request (a template's does): not for the log.
        why = error.code if isinstance(error, ClientError) else error.message
        of_route = isinstance(error, UnknownRoute | MethodNotAllowed)
        request = exchange.request
        logger.warning(
            "refused",
            extra={
                "request": exchange.request_id,
                "tenant": tenant.name if tenant is not None else None,
                "client": exchange.client.address,
                "status": error.status,
                "why": why,
                "param": error.param,
                "method": shown(request.method) if of_route else None,
                "path": loggable(request.raw_path.partition("?")[0]) if of_route else None,
            },
        )
        return error_answer(error, exchange.request.path, exchange.own_headers)

    async def _healthz(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.BaseRequest) -> web.Response:
        reason = self._draining.reason or self._readiness.not_ready()
        if reason is None:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"{reason}\n", headers={"Retry-After": "1"})

    async def _metrics_page(self, request: web.BaseRequest) -> web.Response:
        """Show the metrics; not to tenants, who would see one another's."""
        client = self._clients.find(request.remote, request.headers, request.scheme)
        if self._tenants is not None and not client.sees_details:
            return web.Response(status=403, text="allowed only from loopback or listen.trusted\n")
        return metrics_answer(self._metrics)

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """List what all replicas serve, each model once, as far as the client may use it."""
        try:
            models = self._models_of(request)
        except RouterError as error:
            return error_answer(error, request.path)
        return web.Response(
            body=orjson.dumps({"object": "list", "data": models}),
            content_type="application/json",
        )

    async def _model(self, request: web.BaseRequest) -> web.Response:
        """Show one of them, as OpenAI's API does; vLLM 0.32 has no such route."""
        wanted = request.path.removeprefix(_MODEL)
        try:
            for model in self._models_of(request):
                if model["id"] == wanted:
                    return web.Response(body=orjson.dumps(model), content_type="application/json")
            if self._fleet.absent():
                raise NoReplicaAvailable(f"No replica of `{wanted[:200]}` has answered yet.")
            raise UnknownModel(f"The model `{wanted[:200]}` does not exist.", param="model")
        except RouterError as error:
            return error_answer(error, request.path)

    def _models_of(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        """List the models that a client may use.

        Raises:
            Unauthorized, NoReplicaAvailable: its key is not known; no model is.
        """
        tenant = self._tenant(request)
        models: list[dict[str, Any]] = self._fleet.models()
        if not models:
            raise self._fleet.no_replica()
        if tenant is not None:
            models = [model for model in models if tenant.may_use(model["id"])]
        return models
