"""Connections of a process to itself in memory: no kernel decides when bytes come.

    connect, accept   the client's socket and a new one for the server become the ends of a wire
    transport         the asyncio transport of an end; it hands bytes to that of the other end

Both sockets are real, as their users expect, but are connected to nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Self

_REAL_LISTEN: Final = socket.socket.listen
_REAL_ACCEPT: Final = socket.socket.accept


class Wires:
    """All of them; `install` puts them behind the sockets of this process."""

    def __init__(self) -> None:
        self._listening: dict[Any, socket.socket] = {}  # by address
        self._queues: dict[int, deque[_Wire]] = {}  # by the listening socket's number
        self._ends: dict[socket.socket, _Wire] = {}  # that have no transport yet
        self._num_wires = 0

    @classmethod
    def install(cls) -> Self:
        """Learn of every socket that listens; what is connected here is accepted first."""
        wires = cls()

        def listen(sock: socket.socket, *backlog: int) -> None:
            _REAL_LISTEN(sock, *backlog)
            wires._listening[sock.getsockname()] = sock

        def accept(sock: socket.socket) -> tuple[socket.socket, Any]:
            queue = wires._queues.get(sock.fileno())
            if not queue:
                return _REAL_ACCEPT(sock)
            wire = queue.popleft()
            return wire.server, wire.client_name

        setattr(socket.socket, "listen", listen)  # noqa: B010 - mypy knows no such assignment
        setattr(socket.socket, "accept", accept)  # noqa: B010
        return wires

    def connect(self, client: socket.socket, address: Any) -> None:
        """Connect a socket to an address at which this process listens.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        listening = self._listening.get(address)
        if listening is None or listening.fileno() < 0:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._num_wires += 1
        wire = _Wire(
            client=client,
            server=socket.socket(client.family, client.type),
            client_name=(address[0], self._num_wires),
            server_name=address,
        )
        self._ends[wire.client] = self._ends[wire.server] = wire
        self._queues.setdefault(listening.fileno(), deque()).append(wire)

    def ready(self) -> list[int]:
        """List the listening sockets that can accept a connection."""
        return [fd for fd, queue in self._queues.items() if queue]

    def transport(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None,
    ) -> MemoryTransport | None:
        """Make the transport of an end; None: the socket is no end of a wire."""
        wire = self._ends.pop(sock, None)
        if wire is None:
            return None
        names = [wire.client_name, wire.server_name]
        own, other = names if sock is wire.client else reversed(names)
        made = MemoryTransport(loop, sock, protocol, waiter, {"sockname": own, "peername": other})
        if wire.first is None:
            wire.first = made
        else:
            wire.first.join(made)
            made.join(wire.first)
        return made


class _Wire:
    """A connection on its way; `first` is the transport of the end that has one already."""

    __slots__ = ("client", "client_name", "first", "server", "server_name")

    def __init__(
        self, *, client: socket.socket, server: socket.socket, client_name: Any, server_name: Any
    ) -> None:
        self.client = client
        self.server = server
        self.client_name = client_name
        self.server_name = server_name
        self.first: MemoryTransport | None = None


class MemoryTransport(asyncio.Transport):
    """One end of a connection within the process; the socket is real, and carries nothing."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None,
        names: Mapping[str, Any],
    ) -> None:
        super().__init__({"socket": sock, **names})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._peer: MemoryTransport | None = None  # None: not accepted yet
        self._incoming: list[bytes] = []
        self._outgoing: list[bytes] = []  # until it is accepted
        self._is_reading = True
        self._is_closing = False
        self._has_written_eof = False
        self._has_read_eof = False
        self._is_planned = False
        loop.call_soon(protocol.connection_made, self)
        if waiter is not None:
            loop.call_soon(_release, waiter)

    def join(self, peer: MemoryTransport) -> None:
        """Learn of the other end."""
        self._peer = peer
        for data in self._outgoing:
            peer.take(data)
        self._outgoing.clear()
        if self._has_written_eof:
            peer.take_eof()

    def take(self, data: bytes) -> None:
        """Receive bytes of the other end."""
        self._incoming.append(data)
        self._plan()

    def take_eof(self) -> None:
        """Receive the other end's end."""
        self._has_read_eof = True
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_planned = False
        if self._is_closing or not self._is_reading:
            return
        protocol = self._protocol
        assert isinstance(protocol, asyncio.Protocol)
        if self._incoming:
            data = b"".join(self._incoming)
            self._incoming.clear()
            protocol.data_received(data)
            if self._has_read_eof:
                self._plan()
        elif self._has_read_eof and not protocol.eof_received():
            self.close()

    # -- asyncio.Transport -------------------------------------------------------------------

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._incoming or self._has_read_eof:
            self._plan()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing or self._has_written_eof or not data:
            return
        if self._peer is None:
            self._outgoing.append(bytes(data))
        else:
            self._peer.take(bytes(data))

    def write_eof(self) -> None:
        if self._has_written_eof:
            return
        self._has_written_eof = True
        if self._peer is not None:
            self._peer.take_eof()

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the other end has everything at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self.write_eof()
            self._is_closing = True
            self._loop.call_soon(self._lose)

    def abort(self) -> None:
        self.close()

    def _lose(self) -> None:
        self._protocol.connection_lost(None)
        self._sock.close()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.cancelled():
        waiter.set_result(None)
