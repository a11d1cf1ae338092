"""Go through the rounds: every arm at its place in the order, kept as soon as it is done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from loadtest.compare.busy import Ticks, measure, read_ticks
from loadtest.compare.display import Display
from loadtest.compare.facts import annotate
from loadtest.compare.places import Place
from loadtest.compare.setting import Setting
from loadtest.results import Run, TurnResult

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """The first signal ends the run that is going on, and with it the study; others wait."""

    __slots__ = ("_task", "reason")

    def __init__(self) -> None:
        self.reason = ""
        self._task = asyncio.current_task()

    def listen(self) -> None:
        """Take the signals over, for as long as the loop lives."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request, f"stopped by {number.name}")

    def request(self, reason: str) -> None:
        """Cancel what is going on, once."""
        if not self.reason:
            self.reason = reason
            assert self._task is not None
            self._task.cancel()


async def study(
    setting: Setting,
    place: Place,
    display: Display,
    keep: Callable[[Run], None],
    stop: Stop,
) -> list[Run]:
    """Run everything that the setting orders, or as much as there is time for.

    Args:
        keep: Called with every run as soon as it is done, partial ones too.

    Returns:
        Runs in the order in which they ran. After a stop: those that there are by then.
    """
    runs: list[Run] = []
    arms = {arm.label: arm for arm in setting.arms}
    order = [(number, label) for number, labels in enumerate(setting.order, 1) for label in labels]
    for position, (number, label) in enumerate(order):
        if stop.reason:
            break
        display.begin(label, number)
        meter = _Meter(display, counts=setting.place != "simulated")
        try:
            ran = await place.run(arms[label], number, meter.add)
        except asyncio.CancelledError:
            if not stop.reason:
                raise
            _forget_cancellation()
            break
        run = annotate(
            ran.run,
            position=position,
            cold=ran.cold,
            shares_caches=place.shares_caches,
            busy=measure(meter.before, read_ticks()),
        )
        runs.append(run)
        keep(run)
        display.end(run)
    return runs


class _Meter:
    """Passes turns on, and notes the machine's counters at the first one: after all starting.

    A simulation gives its turns at the end and counts them itself.
    """

    __slots__ = ("_counts", "_display", "before")

    def __init__(self, display: Display, *, counts: bool) -> None:
        self.before: Ticks | None = None
        self._display = display
        self._counts = counts

    def add(self, turn: TurnResult) -> None:
        if self.before is None:
            self.before = read_ticks()
        if self._counts:
            self._display.advance(1)
        self._display.add(turn)


def _forget_cancellation() -> None:
    """Go on after a cancellation that was meant for the run only."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
