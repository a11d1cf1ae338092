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
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from aiohttp import web

from router.api.routes import shown
from router.config import Config
from router.errors import AdminRefused, RouterError
from router.http.answers import error_answer, json_answer, metrics_answer
from router.http.guard import Guard
from router.metrics import Metrics

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Section(Protocol):
    """The routes of one subject: router.http.admin_routes."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""


class AdminApp:
    """The application of the admin port.

    Args:
        guard: Lets operators through.
        in_force: Returns the configuration as it is now: a part of it may be reloaded.
    """

    def __init__(
        self,
        sections: Iterable[Section],
        *,
        guard: Guard,
        metrics: Metrics,
        in_force: Callable[[], Config],
    ) -> None:
        self._sections = sections
        self._guard = guard
        self._metrics = metrics
        self._in_force = in_force

    def build(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(
            client_max_size=self._in_force().limits.body_bytes, middlewares=[self._answer]
        )
        for section in self._sections:
            section.add_to(app.router)
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

    async def _show_config(self, _: web.Request) -> web.Response:
        return json_answer(self._in_force())

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return metrics_answer(self._metrics)
