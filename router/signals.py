"""What signals make a router do.

SIGTERM   drain in three phases: a supervisor's (router.http.draining)
SIGINT    likewise without the first: a person's at a terminal, with no front end
either    a second time: end now; a third time: the system's own way
SIGHUP    read files again
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from router.http.draining import Draining


def handle_signals(stop: asyncio.Event, draining: Draining, reload: Callable[[], None]) -> None:
    """Handle them from now on, on the running loop."""
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        if not stop.is_set():
            if number == signal.SIGINT:
                draining.skip_grace()
            stop.set()
            return
        draining.end_now()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
