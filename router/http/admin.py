"""The admin port: what operators ask. Bound to loopback; behind a bearer token elsewhere.

GET  /admin/replicas                 every replica as the router sees it
POST /admin/replicas/NAME/drain      {"draining": true|false}
POST /admin/explain[?tokens=1]       dry run of a request: every candidate's costs
GET  /admin/config                   the configuration in force
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from router.api.failures import error_body, error_headers
from router.config import Config
from router.errors import BadRequest, RouterError
from router.fleet.fleet import Fleet
from router.pipeline import Pipeline
from router.stages.job import Inbound

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnknownReplica(RouterError):
    status = 404
    code = "unknown_replica"
    type = "NotFoundError"


class _Drain(Struct, forbid_unknown_fields=True):
    draining: bool


class AdminApp:
    """The handlers of the admin port. `token_digest` None: no token asked (loopback only)."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        fleet: Fleet,
        config: Config,
        describe: Callable[[], list[dict[str, Any]]],
        token: str | None,
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._config = config
        self._describe = describe
        self._token_digest = _digest(token) if token is not None else None

    def build(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(
            client_max_size=self._config.limits.body_bytes, middlewares=[self._guard]
        )
        app.router.add_get("/admin/replicas", self._replicas)
        app.router.add_post("/admin/replicas/{name}/drain", self._drain)
        app.router.add_post("/admin/explain", self._explain)
        app.router.add_get("/admin/config", self._show_config)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the token in constant time; turn errors into JSON."""
        if self._token_digest is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(_digest(given), self._token_digest):
                return _json({"error": {"message": "admin token missing or wrong"}}, status=401)
        try:
            return await handler(request)
        except RouterError as error:
            return web.Response(
                status=error.status,
                body=error_body(error, request.path),
                content_type="application/json",
                headers=error_headers(error),
            )

    async def _replicas(self, _: web.Request) -> web.Response:
        return _json({"replicas": self._describe()})

    async def _drain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            wanted = msgspec.json.decode(await request.read() or b"{}", type=_Drain)
        except msgspec.DecodeError as exc:
            raise BadRequest(f'send {{"draining": true}} or false: {exc}') from exc
        try:
            self._fleet.drain(name, draining=wanted.draining)
        except KeyError as exc:
            known = ", ".join(replica.name for replica in self._fleet.replicas) or "none yet"
            raise UnknownReplica(f"no replica {name!r}; known: {known}", param="name") from exc
        return _json({"name": name, "draining": wanted.draining})

    async def _explain(self, request: web.Request) -> web.Response:
        body = await request.read()
        inbound = Inbound(
            api="completions" if b'"prompt"' in body and b'"messages"' not in body else "chat",
            method="POST",
            path="/v1/chat/completions",
            target="/v1/chat/completions",
            headers=request.headers,
            body=body,
            arrived_s=asyncio.get_running_loop().time(),
        )
        explained = await self._pipeline.explain(
            inbound, with_tokens=request.query.get("tokens") in ("1", "true")
        )
        return _json(explained)

    async def _show_config(self, _: web.Request) -> web.Response:
        return _json(self._config)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value, enc_hook=str),  # paths
        content_type="application/json",
    )
