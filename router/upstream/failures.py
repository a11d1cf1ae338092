"""What goes wrong on the way to a replica, under our own names: aiohttp's errors end here."""

from __future__ import annotations

import aiohttp

from router.errors import (
    ConnectTimeout,
    OutOfConnections,
    TlsRefused,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.shortage import shortage
from router.tls import refusal as tls_refusal


def upstream_error(exc: Exception, replica: str, when: str) -> UpstreamError | OutOfConnections:
    """Turn aiohttp's and the system's errors into ours, most specific first."""
    if (short_of := shortage(exc)) is not None:
        return OutOfConnections(f"This router cannot open a connection now ({short_of}).")
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return ConnectTimeout(replica, f"replica {replica} did not accept a connection in time")
    if isinstance(exc, TimeoutError):
        return UpstreamTimeout(replica, f"replica {replica} was silent {when}")
    if (why := tls_refusal(exc)) is not None:
        return TlsRefused(replica, f"replica {replica}: {why}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        return UpstreamUnreachable(replica, f"replica {replica} refused the connection")
    return UpstreamBroken(replica, f"replica {replica} broke off {when} ({type(exc).__name__})")
