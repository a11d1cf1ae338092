"""An event loop in virtual time: when nothing is left to do, its clock jumps to the next timer.

What must live here: the clock and the loop. What must not: what runs in the loop, and how its
connections carry bytes (`memory_wires`). Everything in the loop is then independent of the machine:
work takes no time, waiting takes as long as it should, and a run repeats to the microsecond.

    clock          all that `time` offers, in the whole process, from `install` on
    threads        work for an executor is done at once, in the loop's own thread
    connections    of this process to itself: in memory, without the kernel
    `go_live`      from then on the clock follows the machine's, and new connections are real
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from loadtest.demo.memory_wires import Wires

_REAL_MONOTONIC: Final = time.monotonic
_START_S: Final = 1000.0  # the same in every run: so is what is rounded


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
        """Replace `time.monotonic` and what else counts seconds from anywhere."""
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
    time.time = clock.time
    for name in ("monotonic", "perf_counter", "thread_time"):
        setattr(time, name, clock.monotonic)
    return clock


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on such a clock."""

    def __init__(self, clock: Clock, wires: Wires) -> None:
        self._clock = clock
        self._wires = wires
        super().__init__(_JumpingSelector(clock, wires))

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
        """Connect to a port of this process; after `go_live` to any."""
        if self._clock.is_live:
            await super().sock_connect(sock, address)
        else:
            self._wires.connect(sock, address)

    def _make_socket_transport(
        self,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        waiter: asyncio.Future[None] | None = None,
        **options: Any,
    ) -> asyncio.Transport:
        """Make the transport of a connected socket: asyncio's hook for all plain connections."""
        found = self._wires.transport(self, sock, protocol, waiter)
        if found is None:
            make = super()._make_socket_transport  # type: ignore[misc]
            found = make(sock, protocol, waiter, **options)
        return found


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at files without waiting; instead of waiting the clock jumps."""

    def __init__(self, clock: Clock, wires: Wires) -> None:
        super().__init__()
        self._clock = clock
        self._wires = wires

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, let `timeout` pass on the clock."""
        if self._clock.is_live:
            return super().select(timeout)
        connecting = self._wires.ready()
        found = [(self.get_key(fd), selectors.EVENT_READ) for fd in connecting]
        found += super().select(0 if found or timeout is not None else None)
        if not found and timeout:
            self._clock.jump(timeout)
        return found
