"""What goes wrong on the way to a replica, under our own names: aiohttp's errors end here."""

from __future__ import annotations

import errno
import socket
from typing import Final

import aiohttp

from router.base.errors import (
    AnswerUnreadable,
    ConnectTimeout,
    HostUnknown,
    OutOfConnections,
    TlsRefused,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.base.shortage import shortage
from router.config.tls import refusal as tls_refusal
from router.upstream.session import UnreadableHead

_NO_ROUTE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


def upstream_error(exc: Exception, replica: str, when: str) -> UpstreamError | OutOfConnections:
    """Turn aiohttp's and the system's errors into ours, most specific first."""
    if (short_of := shortage(exc)) is not None:
        return OutOfConnections(f"The router cannot open a connection now ({short_of}).")
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return ConnectTimeout(replica, f"replica {replica} did not accept a connection in time")
    if isinstance(exc, TimeoutError):
        return UpstreamTimeout(replica, f"replica {replica} sent nothing {when}")
    if (why := tls_refusal(exc)) is not None:
        return TlsRefused(replica, f"replica {replica}: {why}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        return unreachable(exc, replica, f"replica {replica}")
    if isinstance(exc, UnreadableHead):
        return AnswerUnreadable(replica, f"replica {replica}: the head of its answer: {exc}")
    return UpstreamBroken(replica, f"replica {replica} failed {when} ({type(exc).__name__})")


def unreachable(exc: aiohttp.ClientConnectorError, replica: str, what: str) -> UpstreamUnreachable:
    """Turn a connection that did not come about into our error; `what` begins its message."""
    cause = exc.os_error
    if isinstance(cause, socket.gaierror):
        reason = cause.strerror or "unknown"
        return HostUnknown(replica, f"{what}: its host name does not resolve ({reason})")
    if cause.errno in _NO_ROUTE:
        return UpstreamUnreachable(replica, f"{what} cannot be reached: {cause.strerror}")
    return UpstreamUnreachable(replica, f"{what} refused the connection")
