"""Who listens where: a look at ports, without a word said there."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

Reach = Literal["open", "refused", "silent", "unknown host", "not an address"]
"""Whether somebody listens at HOST:PORT. A path (`ipc://…`) that is there counts as open."""

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


async def reach(endpoint: str, *, timeout_s: float) -> Reach:
    """Say whether somebody listens at `tcp://HOST:PORT`, `http://HOST:PORT` or `ipc://PATH`."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc":
        return "open" if path and _is_there(path) else "refused"
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)
    except ValueError:
        host, port = None, None
    if not host or not port:
        return "not an address"
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "silent"
    except socket.gaierror:
        return "unknown host"
    except OSError as exc:
        return "silent" if exc.errno in _SILENT else "refused"
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return "open"


def _is_there(path: str) -> bool:
    return os.path.exists(path)


def why_not_free(host: str, port: int) -> str | None:
    """Say why a server cannot listen on a port, by trying for a moment; None: it can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return "unknown host"
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind(address)
                one.listen(1)
            except OSError as exc:
                return exc.strerror or type(exc).__name__
    return None
