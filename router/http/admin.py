"""The admin port: orders and questions of operators, behind a bearer token.

docs/reference/admin.md lists the routes.

A request is checked for headers that a web page cannot fake, and a token.

Host            an address, localhost, or a name of `admin.hosts`; with DNS rebinding a page sends
                its own name

Origin          absent, or this port itself; other pages send theirs

Content-Type    application/json for a body or a POST; a form cannot send it, and a script only
                after a preflight (CORS), which is never granted here

Authorization   the token, compared in constant time

Orders to engines go to all replicas that are named. The public port does not pass on what controls
an engine (router.api.routes). Here an order is named from a list; most routes exist with
VLLM_SERVER_DEV_MODE=1 only (entrypoints/serve/dev, entrypoints/rl/online), an engine without them
answers 404. `sleep` (from level 1 on), `pause` and `reset_prefix_cache` with `reset_external` also
empty the Mooncake pool, for all replicas that share it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from router.api.apis import APIS
from router.api.routes import shown
from router.base.addresses import address_of
from router.base.caller import ANYBODY, Caller
from router.base.errors import (
    AdminRefused,
    BadRequest,
    ConfigError,
    RouterError,
    UnknownReplica,
    UpstreamError,
)
from router.base.messages import Evacuation
from router.config import Config, ReplicaConfig
from router.discovery.engine_api import EngineApi
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.discovery.status import Status
from router.discovery.watches import Watches
from router.http.exchange import error_answer, metrics_answer
from router.metrics import Metrics
from router.replicas.registry import Registry
from router.replicas.replica import Entry, Ordered
from router.request.explain import Explainer
from router.request.results import Inbound
from router.tenants import Tenants

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 60.0  # putting weights away takes its time
_MAX_SHOWN_BYTES: Final = 4096
_FALSE: Final = frozenset({"false", "0", "off", "no", "f", "n"})  # in a query, to the engine

QUESTIONS: Final = ("is_sleeping", "is_paused")
_ADAPTERS: Final = ("load_lora_adapter", "unload_lora_adapter")
_WEIGHTS: Final = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
ROUTES: Final = (
    *QUESTIONS,
    "reset_prefix_cache",
    "reset_mm_cache",
    "reset_encoder_cache",
    "release_kv_cache_memory",
    "sleep",
    "wake_up",
    "pause",
    "resume",
    "start_profile",
    "stop_profile",
    *_WEIGHTS,
    *_ADAPTERS,
)


def path_of(route: str) -> str:
    """Return where engines have a route."""
    return f"/v1/{route}" if route in _ADAPTERS else f"/{route}"


class EngineOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends; `replicas` None: all."""

    route: str
    params: dict[str, Any] = {}
    replicas: Annotated[list[str], Meta(min_length=1)] | None = None


class Control:
    """Passes orders on to engines."""

    def __init__(
        self, api: EngineApi, registry: Registry, models: ServedModels, sleepers: Sleepers
    ) -> None:
        self._api = api
        self._sleepers = sleepers
        self._models = models
        self._registry = registry

    async def follow(self, order: EngineOrder) -> dict[str, Any]:
        """Send an order to all that it names at once; what fails at one does not stop others.

        Raises:
            BadRequest, UnknownReplica: nothing was sent.
        """
        if order.route not in ROUTES:
            raise BadRequest(f"`route` must be one of {', '.join(ROUTES)}", param="route")
        entries = self._named(order.replicas)
        answers = await asyncio.gather(*(self._send(entry, order) for entry in entries))
        logger.warning(
            "order sent to engines",
            extra={
                "route": order.route,
                "replicas": {a["name"]: a["status"] or a["error"] for a in answers},
            },
        )
        return {"route": order.route, "replicas": answers}

    def _named(self, names: Sequence[str] | None) -> list[Entry]:
        entries = {entry.name: entry for entry in self._registry.entries}
        for name in names or ():
            if name not in entries:
                known = ", ".join(entries) or "none"
                raise UnknownReplica(f"no replica {name[:64]!r}; known: {known}")
        return [entries[name] for name in dict.fromkeys(entries if names is None else names)]

    async def _send(self, entry: Entry, order: EngineOrder) -> dict[str, Any]:
        route, params = order.route, order.params
        in_body = route in (*_ADAPTERS, *_WEIGHTS)
        answered: dict[str, Any] = {"name": entry.name, "status": None, "answer": None}
        try:
            answer = await self._api.order(
                entry.name,
                entry.replica.url.rstrip("/") + path_of(route),
                method="GET" if route in QUESTIONS else "POST",
                query={} if in_body else {k: _text(v) for k, v in params.items()},
                body=msgspec.json.encode(params) if in_body else None,
                timeout_s=_TIMEOUT_S,
            )
        except UpstreamError as error:
            return answered | {"error": error.message}
        if route in _ADAPTERS:
            with suppress(UpstreamError):
                await self._models.refresh(entry.name)
        if answer.status < 300:
            self._record(entry.name, route, params)
        return answered | {
            "status": answer.status,
            "answer": _shown(answer.body),
            "error": None if answer.status < 300 else f"answered {answer.status}",
        }

    def _record(self, name: str, route: str, params: Mapping[str, Any]) -> None:
        """Record a pause and its end at once; after an order to sleep, read the metrics now."""
        if route == "pause":
            is_lost = str(params.get("clear_cache", True)).lower() not in _FALSE
            self._sleepers.ordered(Ordered(name, "paused", is_lost), monotonic())
        elif route == "resume":
            self._sleepers.ordered(Ordered(name, "awake"), monotonic())
        elif route in ("sleep", "wake_up"):
            self._sleepers.ordered(Ordered(name, None), monotonic())


def _text(value: Any) -> str | list[str]:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, list) else str(value)


def _shown(body: bytes) -> Any:
    """Read an answer: JSON, else its text; None: it is empty."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body[: _MAX_SHOWN_BYTES + 1])
    except (msgspec.DecodeError, RecursionError):
        return body[:_MAX_SHOWN_BYTES].decode(errors="replace")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")


class AdminPages(Protocol):
    """Some pages of the admin port."""

    def routes(self) -> Mapping[str, Handler]:
        """Return the handlers by method and path, as in `GET /admin/pool`."""


class _Drain(Struct, forbid_unknown_fields=True):
    draining: bool
    evacuate: bool = False
    within_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0


class ReplicaPages:
    """Replicas, and the pools that they share."""

    def __init__(self, watches: Watches, status: Status) -> None:
        self._watches = watches
        self._status = status

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/replicas": self._replicas,
            "POST /admin/replicas": self._add,
            "DELETE /admin/replicas/{name}": self._remove,
            "POST /admin/replicas/{name}/drain": self._drain,
            "GET /admin/pool": self._pool,
        }

    async def _replicas(self, _: web.Request) -> web.Response:
        return json_answer(
            {
                "replicas": list(self._status.replicas()),
                "sharing": self._status.sharing(),
                "sources": self._status.sources(),
            }
        )

    async def _pool(self, _: web.Request) -> web.Response:
        pools = self._status.pools()
        return json_answer({"pool": pools[0] if len(pools) == 1 else None, "pools": pools})

    async def _add(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, ReplicaConfig, '{"url": "http://HOST:PORT"}')
        with as_bad_request():
            entry, is_new = self._watches.add(wanted)
        added = {"name": entry.name, "url": entry.replica.url, "is_new": is_new}
        return json_answer(added, status=201 if is_new else 200)

    async def _drain(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, _Drain, '{"draining": true} or false')
        evacuation = None
        if wanted.evacuate:
            if not wanted.draining:
                raise BadRequest("`evacuate` needs `draining`: true", param="evacuate")
            now = time.time()
            evacuation = Evacuation(begun=now, until=now + wanted.within_s)
        name = request.match_info["name"]
        entry = self._watches.drain(name, draining=wanted.draining, evacuation=evacuation)
        return json_answer({"name": entry.name, "draining": entry.draining})

    async def _remove(self, request: web.Request) -> web.Response:
        entry = self._watches.remove(request.match_info["name"], now=_is_set(request, "now"))
        return json_answer({"name": entry.name, "leaving": entry.leaving}, status=202)


class EnginePages:
    """Orders to engines."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def routes(self) -> Mapping[str, Handler]:
        return {"POST /admin/control": self._order}

    async def _order(self, request: web.Request) -> web.Response:
        order = await read_body(
            request, EngineOrder, '{"route": "reset_prefix_cache", "replicas": ["r1"]}'
        )
        return json_answer(await self._control.follow(order))


class ExplainPages:
    """Dry runs of requests; `tenants` None: clients are not distinguished."""

    def __init__(self, explainer: Explainer, tenants: Tenants | None) -> None:
        self._explainer = explainer
        self._tenants = tenants

    def routes(self) -> Mapping[str, Handler]:
        return {
            "POST /admin/explain": self._explain,
        }

    async def _explain(self, request: web.Request) -> web.Response:
        body = await request.read()
        path = _explained_path(request.query.get("api"), body)
        inbound = Inbound(
            api=APIS[path],
            method="POST",
            path=path,
            target=path,
            headers=request.headers,
            body=body,
            arrived_s=time.monotonic(),
            caller=self._caller(request.query.get("tenant")),
            needs_json=True,
        )
        explained = await self._explainer.explain(inbound, with_tokens=_is_set(request, "tokens"))
        return json_answer(explained)

    def _caller(self, name: str | None) -> Caller:
        """Find whose request a dry run is; `name` is a tenant's.

        Raises:
            BadRequest: there is none of that name.
        """
        if name is None:
            return ANYBODY
        caller = self._tenants.named(name) if self._tenants is not None else None
        if caller is None:
            raise BadRequest(f"unknown tenant {name[:64]!r}", param="tenant")
        return caller


class RouterPages:
    """The router itself; `in_force` returns its configuration as it is now."""

    def __init__(self, metrics: Metrics, in_force: Callable[[], Config]) -> None:
        self._metrics = metrics
        self._in_force = in_force

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/config": self._show_config,
            "GET /admin/metrics": self._metrics_page,
        }

    async def _show_config(self, _: web.Request) -> web.Response:
        return json_answer(self._in_force())

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return await metrics_answer(self._metrics)


async def read_body(request: web.Request, kind: type[_T], example: str) -> _T:
    """Read an order.

    Raises:
        BadRequest: it is not one; the message says what one looks like.
    """
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadRequest(f"send {example}: {exc}") from exc


@contextmanager
def as_bad_request() -> Iterator[None]:
    """Answer what a configuration would be refused for."""
    try:
        yield
    except ConfigError as exc:
        raise BadRequest(exc.message, param=exc.param) from exc


def _explained_path(name: str | None, body: bytes) -> str:
    """Find where a request to be explained would go; without a name, by a field it must have.

    Raises:
        BadRequest: there is no API of that name.
    """
    if name is None:
        name = "chat"
        if b'"messages"' not in body:
            fields = {b'"prompt"': "completions", b'"input"': "responses"}
            name = next((fields[field] for field in fields if field in body), name)
    for path, api in APIS.items():
        if api.name == name:
            return path
    known = ", ".join(api.name for api in APIS.values())
    raise BadRequest(f"unknown API {name[:64]!r}; known: {known}", param="api")


def _is_set(request: web.Request, name: str) -> bool:
    return request.query.get(name) in ("1", "true")


def number_in(query: Mapping[str, str], name: str, default: int, *, most: int) -> int:
    """Read a number from 1 to `most` of a query.

    Raises:
        BadRequest: it is none.
    """
    value = query.get(name, str(default))
    if not value.isdecimal() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
        raise BadRequest(f"{name} must be a number from 1 to {most}", param=name)
    return int(value)


def json_answer(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value, enc_hook=str),  # paths
        content_type="application/json",
    )


class Guard:
    """Checks requests to the admin port.

    Args:
        token: None: none is needed (`admin.open`).
        hosts: Names that the port may be called by, beside addresses and localhost.
    """

    def __init__(self, token: str | None, hosts: Iterable[str]) -> None:
        self._token_digest = _digest(token) if token is not None else None
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    def use(self, token: str) -> None:
        """Ask for another token from the next request on."""
        self._token_digest = _digest(token)

    @property
    def needs_token(self) -> bool:
        """Whether the port asks for a token."""
        return self._token_digest is not None

    def check(self, request: web.Request) -> None:
        """Check that a request is an operator's.

        Raises:
            AdminRefused: it is not an operator's; the message says what is missing.
        """
        self.check_sender(request)
        if self._token_digest is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_right = hmac.compare_digest(_digest(given.strip()), self._token_digest)
            if scheme.lower() != "bearer" or not is_right:
                raise AdminRefused(401, "the admin token is missing or wrong", "Authorization")
        if request.method == "POST" or request.body_exists:
            if request.content_type != "application/json":
                raise AdminRefused(415, "send Content-Type: application/json", "Content-Type")

    def check_sender(self, request: web.Request) -> None:
        """Check that a request is not from another web page, with a token or without.

        Raises:
            AdminRefused: it is, or it calls the port by a name that is not its own.
        """
        host = _host_of(request.headers.get("Host", ""))
        if host not in self._hosts and address_of(host) is None:
            raise AdminRefused(
                403, f"Host {host!r} is not a name of this port; see admin.hosts", "Host"
            )
        if _is_of_another_page(request):
            raise AdminRefused(403, "requests from other web pages are refused", "Origin")


def _is_of_another_page(request: web.Request) -> bool:
    """Return whether a browser sent it for a page that did not come from this port."""
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")


def _host_of(header: str) -> str:
    """Strip the port and the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class AdminApp:
    """The admin port's application.

    Args:
        guard: Admits operators only.
        body_bytes: Largest body.
        open_paths: What has no data, and needs no token.
    """

    def __init__(
        self,
        pages: Sequence[AdminPages],
        *,
        guard: Guard,
        body_bytes: int,
        open_paths: Collection[str] = (),
    ) -> None:
        self._open_paths = open_paths
        self._pages = pages
        self._guard = guard
        self._body_bytes = body_bytes

    def build(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(client_max_size=self._body_bytes, middlewares=[self._answer])
        for pages in self._pages:
            for route, handler in pages.routes().items():
                method, _, path = route.partition(" ")
                if method == "GET":
                    app.router.add_get(path, handler)
                else:
                    app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit operators; turn errors into JSON."""
        try:
            if request.path in self._open_paths:
                self._guard.check_sender(request)
            else:
                self._guard.check(request)
            return await handler(request)
        except RouterError as error:
            if isinstance(error, AdminRefused):
                path = shown(request.path)
                fields = {"address": request.remote, "why": error.param, "path": path}
                logger.warning("admin request refused", extra=fields)
            return error_answer(error, request.path)
