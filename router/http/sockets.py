"""How many connections the limit of open files allows."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

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
