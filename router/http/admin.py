"""The admin port: what operators ask, behind a bearer token; see router.http.guard.

GET    /admin/replicas                every replica as the router sees it
POST   /admin/replicas                add one: {"url", "name"?, "events"?, "replay"?}
DELETE /admin/replicas/NAME[?now=1]   let one go, when its answers in flight are done, or now
POST   /admin/replicas/NAME/drain     {"draining": true|false}
GET    /admin/experiments             every experiment: variants, shares, guardrails, slot
POST   /admin/experiments             start one: its definition
GET    /admin/experiments/NAME        one of them
POST   /admin/experiments/NAME/ramp   {"shares": {ARM: SHARE, …}}
POST   /admin/experiments/NAME/stop   {"arm"?, "reason"?}: a variant, or the whole experiment
DELETE /admin/experiments/NAME        end and forget it
GET    /admin/pool                    what is known of the shared pools
POST   /admin/explain[?tokens=1][&tenant=NAME]   dry run of a request: every candidate's costs
GET    /admin/adapters                LoRA adapters, with the replicas that have them
POST   /admin/adapters                load one at all replicas: {"name", "path", "base"?,
                                      "load_inplace"?}
DELETE /admin/adapters/NAME[?base=]   unload it at all that have it
POST   /admin/control                 order engines: {"route", "params"?, "replicas"?: [NAME, …]}
GET    /admin/refusals                requests that are not sent: replicas went down by them
DELETE /admin/refusals/BODY           allow one of them again, by its digest
GET    /admin/config                  the configuration in force
GET    /admin/metrics                 as /metrics of the public port, which routers may share
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from router.api.apis import APIS
from router.api.routes import shown
from router.config import Config, ReplicaConfig, experiment_of
from router.discovery.status import Status
from router.discovery.watches import Watches
from router.errors import AdminRefused, BadRequest, ConfigError, RouterError
from router.experiments.definition import check
from router.experiments.runner import ExperimentRunner
from router.http.adapters import Adapter, Adapters
from router.http.answers import error_answer, metrics_answer
from router.http.control import Control, Order
from router.http.guard import Guard
from router.metrics import Metrics
from router.replicas.deaths import Body, Deaths
from router.request.explain import Explainer
from router.request.results import Inbound
from router.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")


class _Ramp(Struct, forbid_unknown_fields=True):
    shares: Annotated[dict[str, float], Meta(min_length=1)]


class _Stop(Struct, forbid_unknown_fields=True):
    arm: str | None = None
    reason: Annotated[str, Meta(max_length=200)] = "stopped by an operator"


class _Drain(Struct, forbid_unknown_fields=True):
    draining: bool


class AdminApp:
    """The handlers of the admin port.

    Args:
        guard: Lets operators through.
        tenants: None: clients are not told apart.
        in_force: Returns the configuration as it is now: a part of it may be reloaded.
    """

    def __init__(
        self,
        *,
        explainer: Explainer,
        watches: Watches,
        experiments: ExperimentRunner,
        status: Status,
        config: Config,
        guard: Guard,
        control: Control,
        adapters: Adapters,
        tenants: Tenants | None,
        metrics: Metrics,
        deaths: Deaths,
        in_force: Callable[[], Config],
    ) -> None:
        self._metrics = metrics
        self._deaths = deaths
        self._in_force = in_force
        self._explainer = explainer
        self._watches = watches
        self._runner = experiments
        self._status = status
        self._config = config
        self._guard = guard
        self._control = control
        self._adapters = adapters
        self._tenants = tenants

    def build(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(
            client_max_size=self._config.limits.body_bytes, middlewares=[self._answer]
        )
        app.router.add_get("/admin/replicas", self._replicas)
        app.router.add_post("/admin/replicas", self._add)
        app.router.add_delete("/admin/replicas/{name}", self._remove)
        app.router.add_post("/admin/replicas/{name}/drain", self._drain)
        app.router.add_get("/admin/experiments", self._experiments)
        app.router.add_post("/admin/experiments", self._start)
        app.router.add_get("/admin/experiments/{name}", self._experiment)
        app.router.add_post("/admin/experiments/{name}/ramp", self._ramp)
        app.router.add_post("/admin/experiments/{name}/stop", self._stop)
        app.router.add_delete("/admin/experiments/{name}", self._forget)
        app.router.add_get("/admin/pool", self._pool)
        app.router.add_post("/admin/explain", self._explain)
        app.router.add_get("/admin/adapters", self._list_adapters)
        app.router.add_post("/admin/adapters", self._load_adapter)
        app.router.add_delete("/admin/adapters/{name:.+}", self._unload_adapter)
        app.router.add_post("/admin/control", self._order)
        app.router.add_get("/admin/refusals", self._refusals)
        app.router.add_delete("/admin/refusals/{body}", self._allow)
        app.router.add_get("/admin/config", self._show_config)
        app.router.add_get("/admin/metrics", self._metrics_page)
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let operators through; turn errors into JSON."""
        try:
            self._guard.check(request)
            return await handler(request)
        except RouterError as error:
            if isinstance(error, AdminRefused):
                path = shown(request.path)
                fields = {"address": request.remote, "why": error.param, "path": path}
                logger.warning("admin request refused", extra=fields)
            return error_answer(error, request.path)

    async def _replicas(self, _: web.Request) -> web.Response:
        return _json(
            {
                "replicas": self._status.describe(),
                "sharing": self._status.sharing(),
                "sources": self._status.sources(),
            }
        )

    async def _pool(self, _: web.Request) -> web.Response:
        pools = self._status.describe_pools()
        return _json({"pool": pools[0] if len(pools) == 1 else None, "pools": pools})

    async def _add(self, request: web.Request) -> web.Response:
        wanted = await _read(request, ReplicaConfig, '{"url": "http://HOST:PORT"}')
        with _as_bad_request():
            entry, is_new = self._watches.add(wanted)
        added = {"name": entry.name, "url": entry.replica.url}
        return _json(added, status=201 if is_new else 200)

    async def _drain(self, request: web.Request) -> web.Response:
        wanted = await _read(request, _Drain, '{"draining": true} or false')
        entry = self._watches.drain(request.match_info["name"], draining=wanted.draining)
        return _json({"name": entry.name, "draining": entry.draining})

    async def _remove(self, request: web.Request) -> web.Response:
        entry = self._watches.remove(request.match_info["name"], now=_is_set(request, "now"))
        return _json({"name": entry.name, "leaving": entry.leaving}, status=202)

    async def _experiments(self, _: web.Request) -> web.Response:
        names = [trial.state.definition.name for trial in self._runner.trials]
        return _json({"experiments": [self._described(name) for name in names]})

    async def _experiment(self, request: web.Request) -> web.Response:
        return _json(self._described(request.match_info["name"]))

    async def _start(self, request: web.Request) -> web.Response:
        tree = await _read(request, dict[str, Any], '{"name": …, "arms": [{…}, {…}]}')
        with _as_bad_request():
            definition = experiment_of(tree)
            check(definition)
            self._runner.start(definition, time.time())
        return _json(self._described(definition.name), status=201)

    async def _ramp(self, request: web.Request) -> web.Response:
        wanted = await _read(request, _Ramp, '{"shares": {"VARIANT": 0.5}}')
        name = request.match_info["name"]
        with _as_bad_request():
            self._runner.ramp(name, wanted.shares, time.time())
        return _json(self._described(name))

    async def _stop(self, request: web.Request) -> web.Response:
        wanted = await _read(request, _Stop, '{}, or {"arm": "VARIANT", "reason": "why"}')
        name = request.match_info["name"]
        with _as_bad_request():
            self._runner.stop(name, time.time(), wanted.reason, arm=wanted.arm)
        return _json(self._described(name))

    async def _forget(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._runner.remove(name, time.time())
        return _json({"name": name, "removed": True})

    def _described(self, name: str) -> dict[str, Any]:
        return self._runner.describe(name, time.time())

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
            tenant=self._tenant(request.query.get("tenant")),
            needs_json=True,
        )
        explained = await self._explainer.explain(inbound, with_tokens=_is_set(request, "tokens"))
        return _json(explained)

    def _tenant(self, name: str | None) -> Tenant | None:
        """Find the tenant of a dry run; None: it has none.

        Raises:
            BadRequest: there is none of that name.
        """
        if name is None:
            return None
        tenant = self._tenants.named(name) if self._tenants is not None else None
        if tenant is None:
            raise BadRequest(f"unknown tenant {name[:64]!r}", param="tenant")
        return tenant

    async def _list_adapters(self, _: web.Request) -> web.Response:
        return _json({"adapters": self._adapters.describe()})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        wanted = await _read(request, Adapter, '{"name": "sql", "path": "/adapters/sql-2"}')
        return _json(await self._adapters.load(wanted))

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name, base = request.match_info["name"], request.query.get("base")
        return _json(await self._adapters.unload(name, base))

    async def _order(self, request: web.Request) -> web.Response:
        order = await _read(request, Order, '{"route": "reset_prefix_cache", "replicas": ["r1"]}')
        return _json(await self._control.follow(order))

    async def _refusals(self, _: web.Request) -> web.Response:
        now_s = time.monotonic()
        refusals = [
            {
                "body": each.body.hex(),
                "replicas": each.replicas,
                "left_s": round(each.until_s - now_s, 1),
            }
            for each in self._deaths.refusals(now_s)
        ]
        return _json({"refusals": refusals})

    async def _allow(self, request: web.Request) -> web.Response:
        name = request.match_info["body"]
        try:
            body = Body(bytes.fromhex(name))
        except ValueError as exc:
            raise BadRequest("give a `body` of GET /admin/refusals", param="body") from exc
        is_known = self._deaths.clear(body)
        return _json({"body": name, "allowed": is_known}, status=200 if is_known else 404)

    async def _show_config(self, _: web.Request) -> web.Response:
        return _json(self._in_force())

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return metrics_answer(self._metrics)


async def _read(request: web.Request, kind: type[_T], example: str) -> _T:
    """Read an order.

    Raises:
        BadRequest: it is not one; the message says what one looks like.
    """
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as exc:
        raise BadRequest(f"send {example}: {exc}") from exc


@contextmanager
def _as_bad_request() -> Iterator[None]:
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


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value, enc_hook=str),  # paths
        content_type="application/json",
    )
