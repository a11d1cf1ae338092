"""Whether Redis can be used right now, and why not.

What to do about it is in sharing, how to connect in redis_store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from router.base.errors import StoreError, StoreRefused

logger = logging.getLogger(__name__)

PAUSE_S: Final = (0.1, 1.0)  # first and longest between attempts

_GONE: Final = "redis is unreachable: this router shares nothing"
_REFUSED: Final = "redis refused: this router shares nothing"


class Link:
    """The connection to Redis as the rest of the router sees it.

    `settled` is set after the first attempt, however it ended: nothing waits for Redis for longer.
    """

    __slots__ = ("_is_said_up", "_said", "is_up", "num_outages", "reason", "settled")

    def __init__(self) -> None:
        self.is_up = False
        self.reason = "not connected yet"  # empty while it is up
        self.num_outages = 0
        self.settled = asyncio.Event()
        self._said: set[str] = set()  # reasons, since it was last steady
        self._is_said_up = False

    def came_up(self) -> None:
        """Record that everything is connected and read: state is shared from here."""
        self.is_up, self.reason = True, ""
        self.settled.set()
        if not self._said:
            self.steady()

    def steady(self) -> None:
        """Log that it is up, after a while without failing again."""
        self._said.clear()
        if not self._is_said_up:
            self._is_said_up = True
            logger.info("redis is connected: state is shared")

    def went_down(self, error: StoreError | str) -> None:
        """Record that Redis cannot be used: until it is up again, every router is on its own."""
        reason = error if isinstance(error, str) else error.message
        if self.is_up:
            self.num_outages += 1
        self.is_up, self.reason = False, reason
        self.settled.set()
        if reason not in self._said:
            self._said.add(reason)
            self._is_said_up = False
            is_refused = isinstance(error, StoreRefused)
            logger.warning(_REFUSED if is_refused else _GONE, extra={"reason": reason})
