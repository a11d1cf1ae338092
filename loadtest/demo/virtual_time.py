"""An event loop in virtual time: when nothing is left to do, its clock jumps to the next timer.

What must live here: the clock, the loop, and bytes between connections of one process. What must
not: what runs in the loop. Everything in the loop is then independent of the machine: work takes
no time, waiting takes as long as it should, and a run repeats to the microsecond.

    clock          `time.monotonic` and `time.time` of the whole process, from `install` on
    threads        work for an executor is done at once, in the loop's own thread
    connections    sockets of this process to itself are real, but their bytes pass in memory
    `go_live`      from then on the clock follows the machine's, and threads are threads
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Final

_REAL_MONOTONIC: Final = time.monotonic
_START_S: Final = 1000.0  # the same in every run: so is what is rounded
_HANDSHAKE_S: Final = 0.01  # real seconds: a connection that the kernel still passes to its server

_Ends = tuple[Any, Any]
"""The addresses of a connection's own end and of the other one."""


class Clock:
    """Seconds of this process: virtual until `go_live`."""

    __slots__ = ("_live_since_s", "_now_s", "_wall_s")

    def __init__(self) -> None:
        self._now_s = _START_S
        self._wall_s = time.time() - self._now_s
        self._live_since_s: float | None = None  # real seconds; None: time is virtual

    @property
    def is_live(self) -> bool:
        """Whether it follows the machine's clock."""
        return self._live_since_s is not None

    def monotonic(self) -> float:
        """Replace `time.monotonic`."""
        if self._live_since_s is None:
            return self._now_s
        return self._now_s + _REAL_MONOTONIC() - self._live_since_s

    def time(self) -> float:
        """Replace `time.time`."""
        return self._wall_s + self.monotonic()

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def go_live(self) -> None:
        """Follow the machine's clock from now on."""
        self._live_since_s = _REAL_MONOTONIC()


def install() -> Clock:
    """Put this process on a virtual clock.

    Call it before modules are imported that take `time.monotonic` with them.
    """
    # These wait in real time, so they keep the real clock.
    import queue  # noqa: F401
    import subprocess  # noqa: F401
    import threading  # noqa: F401

    clock = Clock()
    time.monotonic = clock.monotonic
    time.time = clock.time
    return clock


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on such a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._half_open: dict[_Ends, MemoryTransport | None] = {}  # not yet accepted
        super().__init__(_JumpingSelector(clock, lambda: bool(self._half_open)))

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do the work at once; after `go_live` in the executor."""
        if self._clock.is_live:
            return super().run_in_executor(executor, func, *args)
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect without a pause: the other end is in this process, or there is none."""
        if self._clock.is_live:
            await super().sock_connect(sock, address)
        else:
            sock.setblocking(True)
            sock.connect(address)
            sock.setblocking(False)
        self._half_open[sock.getsockname(), sock.getpeername()] = None

    def _make_socket_transport(
        self,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        **options: Any,
    ) -> asyncio.Transport:
        """Make the transport of a connected socket: asyncio's hook for all plain connections."""
        own, other = sock.getsockname(), sock.getpeername()
        if (own, other) in self._half_open:  # the client's end
            client = MemoryTransport(self, sock, protocol, waiter)
            self._half_open[own, other] = client
            return client
        peer = self._half_open.pop((other, own), None)
        if peer is not None:
            server = MemoryTransport(self, sock, protocol, waiter)
            server.join(peer)
            peer.join(server)
            return server
        make = super()._make_socket_transport  # type: ignore[misc]
        found: asyncio.Transport = make(sock, protocol, waiter, **options)
        return found


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at files without waiting; instead of waiting the clock jumps."""

    def __init__(self, clock: Clock, is_connecting: Callable[[], bool]) -> None:
        super().__init__()
        self._clock = clock
        self._is_connecting = is_connecting

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, let `timeout` pass on the clock."""
        if self._clock.is_live or timeout is None:
            return super().select(timeout)
        found = super().select(0)
        while not found and timeout > 0 and self._is_connecting():
            found = super().select(_HANDSHAKE_S)
        if not found and timeout > 0:
            self._clock.jump(timeout)
        return found


class MemoryTransport(asyncio.Transport):
    """One end of a connection within the process; the socket is real, and carries nothing."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None,
    ) -> None:
        names = {"socket": sock, "sockname": sock.getsockname(), "peername": sock.getpeername()}
        super().__init__(names)
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
