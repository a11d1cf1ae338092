"""Sockets to listen on: every address of a host, all at one port; and how many may be open.

0.0.0.0      every IPv4 address of this machine
:: or empty  every address, IPv4 and IPv6: a socket of each kind, so that an IPv4 client's
             address stays as it is
NAME         every address that it has; those of a kind that this machine lacks are left out
[ADDRESS]    an IPv6 address may be written as in URLs
"""

from __future__ import annotations

import errno
import resource
import socket
from contextlib import suppress
from typing import Any, Final

from router.base.addresses import host_port, unbracketed

BACKLOG: Final = 1024
_LACKS: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def listen(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Listen at a port of every address of `host`; 0: at any free one, the same for all.

    Args:
        shared: Others may be bound to the port, too. Nothing listens yet: the kernel spreads
            connections over those that do.

    Raises:
        OSError: the port cannot be had; the message says why.
    """
    host = unbracketed(host)
    is_any = host in ("", "::")
    found = socket.getaddrinfo(
        None if is_any else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if sockets and port == 0:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(_bound(family, kind, protocol, address, shared=shared))
            except OSError as exc:
                if exc.errno not in _LACKS:
                    raise
                lacking = exc
        is_without_v6 = all(one.family != socket.AF_INET6 for one in sockets)
        if lacking is not None and (not sockets or (host == "::" and is_without_v6)):
            raise lacking
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def cannot_listen(host: str, port: int, why: str) -> str:
    """Return why a port cannot be had, in the words of `serve` and `check`."""
    return f"cannot listen on {host_port(host, port)}: {why}"


def why_not(host: str, exc: OSError) -> str:
    """Return why `listen` failed, in words for people."""
    if isinstance(exc, socket.gaierror):
        return f"unknown host ({exc.strerror})"
    if exc.errno in _LACKS:
        is_any = unbracketed(host) == "::"
        return "this machine has no IPv6; write 0.0.0.0" if is_any else "no address of this machine"
    return exc.strerror or type(exc).__name__


def _bound(family: int, kind: int, protocol: int, address: Any, *, shared: bool) -> socket.socket:
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


_MOST_DESCRIPTORS: Final = 1 << 20
_MOST_CONNECTIONS: Final = 16_384
_RESERVE: Final = 256


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as this process may: each client needs two."""
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
