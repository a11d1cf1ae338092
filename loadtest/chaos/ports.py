"""Ports for servers that keep theirs over several lives: below those that the kernel hands out."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

FIRST, LAST = 10_000, 32_000


def free_ports(dice: random.Random) -> Iterator[int]:
    """Yield ports on which no process listens, none of them twice."""
    ports = list(range(FIRST, LAST))
    dice.shuffle(ports)
    for port in ports:
        if _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        return True
    return False
