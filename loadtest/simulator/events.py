"""What will happen, in order of time; what happens may plan more."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

Happen = Callable[[float], None]


class Kind(IntEnum):
    """What can happen, in the order in which it does at one and the same moment."""

    NOTE = 0  # another router's request becomes known
    TURN = 1  # a turn arrives
    READ = 2  # a read from the pool is done
    ENGINE = 3  # a leap ends, or an idle engine begins
    METRICS = 4  # a router reads an engine's metrics


class Events:
    """Those of one moment happen in the order of `Kind`, then in the order they were planned."""

    __slots__ = ("_num_left", "_num_planned", "_planned")

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, int, Happen]] = []
        self._num_planned = 0
        self._num_left = 0  # of these, other than readings of metrics

    def plan(self, at_s: float, kind: Kind, happen: Happen) -> None:
        """Have `happen` called with `at_s`, when that moment has come."""
        self._num_planned += 1
        self._num_left += kind != Kind.METRICS
        heappush(self._planned, (at_s, kind, self._num_planned, happen))

    @property
    def is_over(self) -> bool:
        """Whether nothing is planned but readings of metrics: they end with all else."""
        return not self._num_left

    def run(self) -> None:
        """Let everything happen until nothing is planned."""
        while self._planned:
            now_s, kind, _, happen = heappop(self._planned)
            self._num_left -= kind != Kind.METRICS
            happen(now_s)
