"""Ports for servers that get theirs before they start: free, and not given again soon.

They lie below those that the kernel hands out (32,768 and above on Linux, 49,152 and above
elsewhere). The kernel may give such a port to another process before the server listens, and an
engine takes half a minute until then. Processes of a test run choose from slices of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from itertools import count

FIRST, NUM_SLICES, SLICE = 10_000, 16, 700


def free_port() -> int:
    """Return a port on which no process listens."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("0.0.0.0", port))
            return port
    raise AssertionError("unreachable: ports are counted without end")


def _own_ports() -> Iterator[int]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")
    first = FIRST + int(worker) % NUM_SLICES * SLICE
    start = random.randrange(SLICE)  # another run on this machine begins elsewhere
    for number in count(start):
        yield first + number % SLICE


_ports = _own_ports()
