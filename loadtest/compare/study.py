"""Run the rounds in order, and keep each run as soon as it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loadtest.compare.facts import annotate
from loadtest.compare.places import Place
from loadtest.compare.setting import Setting
from loadtest.results import Run, TurnResult
from loadtest.runner.display import Display, Tally
from loadtest.runner.stop import Stop


async def study(
    setting: Setting,
    place: Place,
    display: Display,
    keep: Callable[[Run], None],
    stop: Stop,
) -> list[Run]:
    """Run everything that the setting asks for, until a stop.

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
        meter = _Meter(display, Tally(label, setting.num_turns))
        if setting.place in ("emulated", "engines"):
            display.starting(label)
        try:
            ran = await place.run(arms[label], number, meter)
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
        )
        runs.append(run)
        keep(run)
        note = "" if run.info.is_complete else f"  NOT COMPLETE: {run.info.note}"
        display.finished(meter.tally, f"round {number}{note}")
    return runs


class _Meter:
    """Counts a run for the display.

    A simulation counts turns as it goes (`advance`) and gives their results at the end.
    """

    __slots__ = ("_begin_s", "_display", "_is_ahead", "tally")

    def __init__(self, display: Display, tally: Tally) -> None:
        self.tally = tally
        self._display = display
        self._begin_s = time.monotonic()
        self._is_ahead = False

    def add(self, turn: TurnResult) -> None:
        self.tally.add(turn, advances=not self._is_ahead)
        self._show()

    def advance(self, num_turns: int) -> None:
        self._is_ahead = True
        self.tally.advance(num_turns)
        self._show()

    def _show(self) -> None:
        self.tally.elapsed_s = time.monotonic() - self._begin_s
        self._display.update(self.tally)


def _forget_cancellation() -> None:
    """Continue after a cancellation that was meant for the run only."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
