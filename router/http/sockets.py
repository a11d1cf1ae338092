"""Listening sockets, and how many connections the limit of open files allows."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress
from typing import Any, Final

_MOST_DESCRIPTORS: Final = 1 << 20
_MOST_CONNECTIONS: Final = 16_384
_RESERVE: Final = 256
BACKLOG: Final = 1024


def bound(
    family: int, kind: int, protocol: int, address: Any, *, shared: bool = False
) -> socket.socket:
    """Create a listening socket; an IPv6 one takes no IPv4 connections.

    Args:
        shared: Others may be bound to the address, too. This one does not listen yet: the kernel
            spreads connections over those that do.
    """
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        if not shared:
            listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may: each client needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room_for_connections(wanted: int | None) -> int:
    """Return how many clients can be connected: each may need a connection to a replica, too.

    Args:
        wanted: As configured; None: as many as descriptors allow.
    """
    if wanted is not None:
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    reserve = max(_RESERVE, soft // 8)  # event streams, files, Redis, probes
    return max(16, min(_MOST_CONNECTIONS, (soft - reserve) // 2))
