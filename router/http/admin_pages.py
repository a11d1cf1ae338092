"""The pages of the admin port: their routes and handlers, by subject."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from router.api.apis import APIS
from router.base.caller import ANYBODY, Caller
from router.base.errors import BadRequest, ConfigError
from router.base.messages import Evacuation
from router.config import Config, ReplicaConfig
from router.discovery.status import Status
from router.discovery.watches import Watches
from router.http.connection import metrics_answer
from router.http.control import Control, EngineOrder
from router.metrics import Metrics
from router.request.explain import Explainer
from router.request.results import Inbound
from router.tenants import Tenants

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
                "replicas": [each.shown() for each in self._status.replicas()],
                "sharing": self._status.sharing(),
                "sources": self._status.sources(),
            }
        )

    async def _pool(self, _: web.Request) -> web.Response:
        pools = self._status.pools.describe(time.monotonic())
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
