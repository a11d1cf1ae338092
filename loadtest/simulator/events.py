"""The events of a simulation in order of time; each may plan others."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

Happen = Callable[[float], None]


class Kind(IntEnum):
    """The kinds of events, in the order in which they happen at one moment."""

    NOTE = 0  # another router's request becomes known
    TURN = 1  # a turn arrives
    READ = 2  # a read from the pool is done
    ENGINE = 3  # a leap ends, or an idle engine begins
    METRICS = 4  # a router reads an engine's metrics


class Events:
    """Events of one moment happen in the order of `Kind`, then as they were planned."""

    __slots__ = ("_num_left", "_num_planned", "_planned")

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, int, Happen]] = []
        self._num_planned = 0
        self._num_left = 0  # of these, other than readings of metrics

    def plan(self, at_s: float, kind: Kind, happen: Happen) -> None:
        """Call `happen` with `at_s` at that moment."""
        self._num_planned += 1
        self._num_left += kind != Kind.METRICS
        heappush(self._planned, (at_s, kind, self._num_planned, happen))

    @property
    def is_over(self) -> bool:
        """Whether only readings of metrics are planned: they end with everything else."""
        return not self._num_left

    def run(self) -> None:
        """Run all events until none is planned."""
        while self._planned:
            now_s, kind, _, happen = heappop(self._planned)
            self._num_left -= kind != Kind.METRICS
            happen(now_s)
