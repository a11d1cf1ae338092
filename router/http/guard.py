"""Checks of requests to the admin port: headers that a web page cannot fake, and a token.

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
from collections.abc import Iterable

from aiohttp import web

from router.base.addresses import address_of
from router.base.errors import AdminRefused


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
