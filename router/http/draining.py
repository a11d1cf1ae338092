"""The shutdown of a router, without losing an answer that can still be given:

1 leaving   /readyz answers 503, and each answer ends its connection. Everything is served, so that
            front ends can notice. On a shared port the other routers accept new connections.

2 draining  no new connection is accepted; answers in flight are finished

3 cut       the rest gets an error in its API's shape, and is closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final, TypeVar

from router.base.errors import ShuttingDown
from router.config import ListenConfig
from router.http.server import Listener

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.02
_LAST_WORDS_S: Final = 1.0  # to write errors

_T = TypeVar("_T")


class Draining:
    """Ends what listeners serve, in order; see `run`."""

    def __init__(self, config: ListenConfig) -> None:
        self._config = config
        self._deadlines: set[asyncio.Timeout] = set()
        self._grace_s = config.drain_grace_s
        self._now = asyncio.Event()
        self._is_cut = False
        self.reason: str | None = None  # why requests should go elsewhere; None: they may come

    async def until_cut(self, work: Awaitable[_T]) -> _T:
        """Wait for a part of a request's work.

        Raises:
            ShuttingDown: the router ends first.
        """
        try:
            async with asyncio.timeout(0 if self._is_cut else None) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await work
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if deadline.expired():
                raise ShuttingDown("the router is shutting down; send the request again") from None
            raise

    def skip_grace(self) -> None:
        """Leave the first phase out: a person at a terminal has no front end that must notice."""
        self._grace_s = 0.0

    def end_now(self) -> None:
        """Wait no longer, whatever phase it is."""
        self._now.set()

    async def run(self, listener: Listener) -> None:
        """Drain a listener; when this returns, nothing of it is in flight."""
        self.reason = "shutting down"
        logger.info(
            "draining",
            extra={"grace_s": self._grace_s, "drain_s": self._config.drain_s},
        )
        listener.leave()
        if self._config.shared:
            listener.take_queued()
            listener.close()
        await self._pause(self._grace_s)
        listener.take_queued()
        listener.close()
        num_left = await self._until_idle(listener, self._config.drain_s)
        if num_left:
            logger.warning("answers cut off: the router stops", extra={"number": num_left})
            self._is_cut = True
            for deadline in list(self._deadlines):
                if not deadline.expired():
                    deadline.reschedule(0.0)
            self._now.clear()
            await self._until_idle(listener, _LAST_WORDS_S)

    async def _until_idle(self, listener: Listener, longest_s: float) -> int:
        """Wait until no request is in flight; return how many are when the time is over."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while (num_busy := listener.close_idle()) and loop.time() < end_s:
            if self._now.is_set():
                break
            await self._pause(_LOOK_S)
        return num_busy

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._now.wait()
