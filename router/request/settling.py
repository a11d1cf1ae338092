"""The one place that waits for the block events of answers."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from router.base.supervisor import described

logger = logging.getLogger(__name__)

EVENTS_S: Final = 0.5  # events take 0.1 s
MAX_WAITING: Final = 4096

Settle = Callable[[bool], bool]
"""Is asked whether all has come; true: it waits no longer. Its argument: no more is waited for."""


class Settling:
    """What waits for events, each with a deadline of its own."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Settle]] = deque()

    def add(self, settle: Settle, until_s: float) -> None:
        """Ask again until `until_s`, monotonic; at once and for the last time if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            _settled(settle, True)
        else:
            self._waiting.append((until_s, settle))

    def sweep(self, now_s: float) -> None:
        """Ask all that wait."""
        for _ in range(len(self._waiting)):
            until_s, settle = self._waiting.popleft()
            if not _settled(settle, now_s >= until_s):
                self._waiting.append((until_s, settle))

    def close(self) -> None:
        """Wait no longer."""
        self.sweep(math.inf)


def _settled(settle: Settle, is_last: bool) -> bool:
    """Ask one; what it raises ends neither the round nor a request. It would raise again."""
    try:
        return settle(is_last)
    except Exception as exc:
        logger.error("an answer was not settled", extra={"reason": described(exc)})
        return True
