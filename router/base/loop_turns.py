"""The event loop's time: requests share its turns, and calls that may never return run beside it.

To read, tokenize or place a large prompt takes some milliseconds without a pause. A thousand of
them that are ready at once would take seconds in one turn, and all else would wait: streams,
probes, `/healthz`. So a request asks for time before each such piece of work. It gets the time at
once if this turn has some left, else in a later turn. First come, first served.

An executor's threads are waited for when the process ends. Those of `in_thread` are not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final, TypeVar

TURN_S: Final = 0.01
"""Work of requests in one turn of the loop, at least one piece."""


class Turns:
    """The time that requests may take in each turn; on one loop."""

    __slots__ = ("_began_s", "_num_at_once", "_turn_s", "_waiting")

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._began_s: float | None = None  # work of this turn; None: none yet
        self._num_at_once = 1  # of those that wait, so many fit into a turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Count requests that wait for a turn."""
        return len(self._waiting)

    async def take(self) -> None:
        """Wait for a turn with time left; return at once if this one has."""
        loop = asyncio.get_running_loop()
        if self._began_s is None:
            self._began_s = perf_counter()
            loop.call_soon(self._end)
            return
        if not self._waiting and perf_counter() - self._began_s < self._turn_s:
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _end(self) -> None:
        """End a turn's work; if requests wait, begin the next one's."""
        assert self._began_s is not None
        if not self._waiting:
            self._began_s, self._num_at_once = None, 1
            return
        took_s = perf_counter() - self._began_s
        if took_s > self._turn_s:
            self._num_at_once = max(1, int(self._num_at_once * self._turn_s / took_s))
        else:
            self._num_at_once += 1
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)  # before what the next turn wakes, and `_end` behind it
        for _ in range(min(self._num_at_once, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began_s = perf_counter()


T = TypeVar("T")


def in_thread(call: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Make a call in a daemon thread.

    Raises:
        RuntimeError: there are too many threads.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        if not result.done():
            settle()

    def run() -> None:
        try:
            settle = partial(result.set_result, call())
        except Exception as exc:
            settle = partial(result.set_exception, exc)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
