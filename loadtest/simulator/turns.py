"""When each turn of a workload comes: at its time, or after the turns that it waits for."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest.simulator.setup import Setup
from loadtest.workload import Turn, TurnKey, Workload


class Turns:
    """The turns of one workload; each comes once, from `first` or from `after`.

    Args:
        workload: Has the turns.
        setup: Open or closed loop.
        stretch: Factor on arrival times.
    """

    __slots__ = ("_num_awaited", "_setup", "_stretch", "_waiting_for", "_workload")

    def __init__(self, workload: Workload, setup: Setup, stretch: float) -> None:
        self._workload = workload
        self._setup = setup
        self._stretch = stretch
        self._waiting_for: dict[TurnKey, list[Turn]] = {}
        self._num_awaited: dict[TurnKey, int] = {}

    def first(self) -> Iterator[tuple[Turn, float]]:
        """Yield the turns that wait for no other, each with its time."""
        closed = self._setup.loop == "closed"
        for turn in self._workload.turns:
            if closed and turn.after:
                awaited = dict.fromkeys(turn.after)
                self._num_awaited[turn.key] = len(awaited)
                for key in awaited:
                    self._waiting_for.setdefault(key, []).append(turn)
            else:
                yield turn, turn.arrival_s * self._stretch

    def after(self, turn: Turn, now_s: float) -> Iterator[tuple[Turn, float]]:
        """Yield the turns that waited for this one alone."""
        for waiting in self._waiting_for.pop(turn.key, ()):
            self._num_awaited[waiting.key] -= 1
            if not self._num_awaited[waiting.key]:
                yield waiting, now_s + waiting.wait_s
