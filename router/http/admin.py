"""The admin port: orders and questions of operators, behind a bearer token.

docs/reference/admin.md lists the routes, router.http.admin_pages has their handlers.

A request is checked for headers that a web page cannot fake, and a token.

Host            an address, localhost, or a name of `admin.hosts`; with DNS rebinding a page sends
                its own name

Origin          absent, or this port itself; other pages send theirs

Content-Type    application/json for a body or a POST; a form cannot send it, and a script only
                after a preflight (CORS), which is never granted here

Authorization   the token, compared in constant time
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Collection, Iterable, Sequence

from aiohttp import web

from router.api.routes import shown
from router.base.addresses import address_of
from router.base.errors import AdminRefused, RouterError
from router.http.admin_pages import AdminPages, Handler
from router.http.connection import error_answer


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
