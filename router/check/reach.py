"""Whether something listens at an address: it connects, and sends nothing.

And the time limit of a check.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlsplit

CONNECT_S: Final = 2.0

Reach = Literal["open", "refused", "silent", "unknown host", "not an address"]
"""The result of connecting to HOST:PORT. An existing path (`ipc://…`) counts as open."""

_SILENT: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


async def reach(endpoint: str, *, timeout_s: float) -> Reach:
    """Try to connect to `tcp://HOST:PORT`, `http://HOST:PORT` or `ipc://PATH`."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc":
        return "open" if path and _exists(path) else "refused"
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


def _exists(path: str) -> bool:  # apart: ruff's ASYNC240 knows it for blocking
    return os.path.exists(path)


class Deadline:
    """When a check ends."""

    __slots__ = ("_at_s",)

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """The remaining time, at least 0."""
        return max(0.0, self._at_s - time.monotonic())

    def at_most(self, timeout_s: float) -> float:
        """Shorten a timeout to the remaining time; always above 0."""
        return max(0.01, min(timeout_s, self.left_s))
