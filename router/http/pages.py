"""The pages of the public port that the router answers itself, without an engine.

An `OwnRoute` is for a caller with its key, all others need none.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import Struct

from router.api.apis import ModelAliases
from router.base.caller import Caller
from router.base.errors import NoReplicaAvailable, RouterError, UnknownModel
from router.discovery.readiness import Readiness
from router.http.exchange import Access, error_answer, metrics_answer
from router.http.server import Draining, Handler
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.replica import model_entries

PING: Final = "/ping"
"""SageMaker's name for `/health`; vLLM takes a POST there, too."""

_MODEL: Final = "/v1/models/"

_Entry = dict[str, Any]


class Pages:
    """/healthz, /readyz, /metrics; and as engines have them: /v1/models, /health, /version.

    Args:
        aliases: Other names of served models.
        admin: The admin port's address if this port is shared: each scrape of a shared port would
            be another router's. None: it is this router's alone.
    """

    def __init__(
        self,
        *,
        access: Access,
        fleet: Fleet,
        readiness: Readiness,
        draining: Draining,
        metrics: Metrics,
        aliases: ModelAliases,
        admin: str | None = None,
    ) -> None:
        self._access = access
        self._fleet = fleet
        self._readiness = readiness
        self._draining = draining
        self._metrics = metrics
        self._aliases = aliases
        self._admin = admin
        self._pages: dict[str, Handler] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
            "/v1/models": self.models,
            "/health": self._health,
            PING: self._health,
            "/version": self._version,
        }

    def find(self, path: str) -> Handler | None:
        """Find a page; None: there is none at this path."""
        if path.startswith(_MODEL):
            return self._model if path != _MODEL else None
        return self._pages.get(path)

    async def _healthz(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.BaseRequest) -> web.Response:
        reason = self._draining.reason or self._readiness.not_ready()
        if reason is None:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"{reason}\n", headers={"Retry-After": "1"})

    async def _health(self, _: web.BaseRequest) -> web.Response:
        """Answer whether a request could be answered now: 200 or 503, as vLLM's `/health` does."""
        try:
            self._fleet.offers.candidates(None, time.monotonic())
        except RouterError:
            return web.Response(status=503)
        return web.Response(status=503 if self._draining.reason is not None else 200)

    async def _version(self, request: web.BaseRequest) -> web.Response:
        """Answer with the release of vLLM that all replicas have at least."""
        if not self._fleet.members.replicas:
            return error_answer(self._fleet.offers.no_replica(), request.path)
        body = orjson.dumps({"version": self._fleet.members.version()})
        return web.Response(body=body, content_type="application/json")

    async def _metrics_page(self, request: web.BaseRequest) -> web.Response:
        """Show the metrics; not to tenants, who would see one another's."""
        may_see = self._access.tenants is None or self._access.client(request).sees_details
        if not may_see:
            return web.Response(status=403, text="allowed only from loopback or listen.trusted\n")
        if self._admin is not None:
            text = (
                "several routers share this port, and each counts for itself; ask the admin port "
                f"of each: /admin/metrics at {self._admin} for this one\n"
            )
            return web.Response(status=404, text=text)
        return await metrics_answer(self._metrics)

    async def models(self, request: web.BaseRequest) -> web.Response:
        """List what all replicas serve, each model once, as far as the client may use it.

        Then its aliases, but for those with `*`.
        """
        try:
            served = self._models_of(request)
            named = [self._named(name, served) for name in self._aliases.names]
            models = [*served.values(), *(model for model in named if model is not None)]
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
            served = self._models_of(request)
            if (model := served.get(wanted) or self._named(wanted, served)) is not None:
                return web.Response(body=orjson.dumps(model), content_type="application/json")
            if self._fleet.offers.absent():
                raise NoReplicaAvailable(f"No replica of `{wanted[:200]}` has answered yet.")
            raise UnknownModel(f"The model `{wanted[:200]}` does not exist.", param="model")
        except RouterError as error:
            return error_answer(error, request.path)

    def _named(self, name: str, served: Mapping[str, _Entry]) -> _Entry | None:
        """Describe a model by an alias; None: it is none of a model that the client may use."""
        if name in self._fleet.members.served:
            return None
        model = served.get(self._aliases.model_of(name) or "")
        return None if model is None else {**model, "id": name}

    def _models_of(self, request: web.BaseRequest) -> dict[str, _Entry]:
        """List the models that a client may use, by name.

        Raises:
            Unauthorized, NoReplicaAvailable: its key is not known; no model is.
        """
        caller = self._access.caller(request)
        models = model_entries(self._fleet.members.replicas)
        if not models:
            raise self._fleet.offers.no_replica()
        return {model["id"]: model for model in models if caller.may_use(model["id"])}


class Asked(Struct, frozen=True, kw_only=True):
    """A request for such a route; `body` None: it has none."""

    caller: Caller
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes | None


OwnRoutes = Mapping[str, Callable[[Asked], Awaitable[dict[str, Any]]]]
"""Path -> what answers its POSTs, with a JSON object; it may raise a RouterError."""
