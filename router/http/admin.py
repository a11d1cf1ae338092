"""The admin port: orders and questions of operators, behind a bearer token (router.http.guard).

docs/reference/admin.md lists the routes, router.http.admin_pages has their handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from aiohttp import web

from router.api.routes import shown
from router.base.errors import AdminRefused, RouterError
from router.http.admin_pages import AdminPages, Handler
from router.http.answers import error_answer
from router.http.guard import Guard

logger = logging.getLogger(__name__)


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
