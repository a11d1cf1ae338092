"""Addresses at which a connection hangs: packets that a firewall drops, a full backlog, TLS."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def no_accept(port: int = 0) -> Iterator[int]:
    """Listen with a full backlog: Linux then drops the first packet of each connection."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield server.getsockname()[1]


@contextmanager
def no_answer() -> Iterator[int]:
    """Accept connections and say nothing: a TLS handshake never ends."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield server.getsockname()[1]
