"""When each turn of a workload comes: at its time, or after the turns that it waits for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from loadtest.simulator.setup import Setup
from loadtest.workload import Turn, TurnKey, Workload


class Turns:
    """The turns of one workload; each comes once, from `first` or from `after`.

    Args:
        workload: Has the turns.
        setup: Open or closed loop, and in a closed one the number of sessions at once.
        stretch: Factor on arrival times.
    """

    __slots__ = ("_not_started", "_num_awaited", "_num_left", "_setup", "_stretch", "_waiting_for",
                 "_workload")  # fmt: skip

    def __init__(self, workload: Workload, setup: Setup, stretch: float) -> None:
        self._workload = workload
        self._setup = setup
        self._stretch = stretch
        self._waiting_for: dict[TurnKey, list[Turn]] = {}
        self._num_awaited: dict[TurnKey, int] = {}
        self._num_left = Counter(turn.session_id for turn in workload.turns)
        self._not_started: deque[Turn] = deque()  # first turns of sessions, once others are over

    def first(self) -> Iterator[tuple[Turn, float]]:
        """Yield the turns that wait for no other, each with its time."""
        closed = self._setup.loop == "closed"
        num_free = self._setup.concurrency if closed else None
        for turn in self._workload.turns:
            if closed and turn.after:
                awaited = dict.fromkeys(turn.after)
                self._num_awaited[turn.key] = len(awaited)
                for key in awaited:
                    self._waiting_for.setdefault(key, []).append(turn)
            elif num_free == 0:
                self._not_started.append(turn)
            else:
                num_free = None if num_free is None else num_free - 1
                yield turn, turn.arrival_s * self._stretch

    def after(self, turn: Turn, now_s: float) -> Iterator[tuple[Turn, float]]:
        """Yield the turns that waited for this one alone, or for its session's end."""
        for waiting in self._waiting_for.pop(turn.key, ()):
            self._num_awaited[waiting.key] -= 1
            if not self._num_awaited[waiting.key]:
                yield waiting, now_s + waiting.wait_s
        self._num_left[turn.session_id] -= 1
        if not self._num_left[turn.session_id] and self._not_started:
            yield self._not_started.popleft(), now_s
