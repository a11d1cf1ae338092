"""How a signal ends what is going on."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Cancels the task that made it at the first signal; further signals are ignored.

    Attributes:
        reason: Why it was cancelled; "": it was not.
    """

    __slots__ = ("_task", "reason")

    def __init__(self) -> None:
        self.reason = ""
        self._task = asyncio.current_task()

    def listen(self) -> None:
        """Handle the signals for as long as the loop lives."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request, f"stopped by {number.name}")

    def request(self, reason: str) -> None:
        """Cancel the task, once."""
        if not self.reason:
            self.reason = reason
            assert self._task is not None
            self._task.cancel()
