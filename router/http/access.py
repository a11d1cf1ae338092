"""Who may use the public port, and for what: routes, clients, callers, and web pages (CORS).

Web pages are allowed as vLLM allows them by default. Preflights are answered here, before any key
or replica is asked for: browsers send them without the page's key. Answers of engines keep the
engine's headers. A proxy in front may allow less. The admin port has none.

Source: Starlette 1.10 middleware/cors.py with vLLM 0.32's defaults: every origin, method and
header, and no credentials (cookies).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web
from msgspec import Struct

from router.api.clients import Client, Clients
from router.api.routes import Route, Routes, path_of
from router.base.caller import ANYBODY, Caller
from router.tenants import Tenants

ALLOW: Final = "Access-Control-Allow-Origin"
_METHODS: Final = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
_MAX_AGE_S: Final = "600"
_EXPOSED: Final = (
    "Retry-After, X-Request-Id, x-warmroute-request-id, x-warmroute-replica, x-warmroute-policy, "
    "x-warmroute-variant, x-warmroute-prefill, x-warmroute-cached, x-warmroute-ms, "
    "x-warmroute-waited-ms, x-warmroute-waited-for, x-warmroute-waits"
)
_ASKED: Final = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


def preflight(request: web.BaseRequest) -> web.Response | None:
    """Answer the question whether a page may send a request; None: it is another question."""
    asked = request.headers
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in asked:
        return None
    if "Origin" not in asked:
        return None
    headers = {
        **page_headers(asked),
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Max-Age": _MAX_AGE_S,
        "Vary": _ASKED,
    }
    if wanted := asked.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(text="OK", headers=headers)


def page_headers(asked: Mapping[str, str]) -> dict[str, str]:
    """Return what the router's own answer to a request says about web pages.

    Args:
        asked: The headers of the request.
    """
    if "Origin" not in asked:
        return {}
    return {ALLOW: "*", "Access-Control-Expose-Headers": _EXPOSED}


class Access(Struct, frozen=True, kw_only=True):
    """What the public port asks about a request before it is served."""

    routes: Routes
    clients: Clients
    tenants: Tenants | None  # None: clients are not told apart

    def client(self, request: web.BaseRequest) -> Client:
        """Find the client of a request."""
        return self.clients.find(request.remote, request.headers, request.scheme)

    def caller(self, request: web.BaseRequest) -> Caller:
        """Find who sends a request, by its key.

        Raises:
            Unauthorized: its key is missing or unknown.
        """
        return self.tenants.authenticate(request.headers) if self.tenants is not None else ANYBODY

    def route(self, request: web.BaseRequest) -> Route:
        """Find the route of a request.

        Raises:
            UnknownRoute, MethodNotAllowed: it is not served.
        """
        return self.routes.find(request.method, path_of(request.raw_path))
