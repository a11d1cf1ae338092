"""Finished requests, for those who watch. A slow listener loses the oldest, which is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from router.base.bounded import Backlog
from router.base.errors import Overloaded
from router.records.record import DecisionRecord
from router.request.observer import Observer

MAX_LISTENERS: Final = 16

NUM_LAST: Final = 20
"""Requests that are kept for those who begin to listen."""


class Feed(Observer):
    """Hands each finished request to the listeners. Call from one thread."""

    def __init__(self) -> None:
        self._listeners: list[Backlog[DecisionRecord]] = []  # what each has not taken yet
        self._last: deque[DecisionRecord] = deque(maxlen=NUM_LAST)

    def __len__(self) -> int:
        """Count the listeners."""
        return len(self._listeners)

    def recorded(self, record: DecisionRecord) -> None:
        """Hand out a record."""
        self._last.append(record)
        for listener in self._listeners:
            listener.push(record)

    @contextmanager
    def subscribe(self, max_waiting: int, num_last: int = 0) -> Iterator[Backlog[DecisionRecord]]:
        """Listen within the block.

        Args:
            max_waiting: Records that wait for the listener at most.
            num_last: Records of before that it gets first.

        Raises:
            Overloaded: too many listen already.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listeners follow the live feed; that is the limit")
        listener: Backlog[DecisionRecord] = Backlog(max_waiting)
        listener.extend(list(self._last)[max(0, len(self._last) - num_last) :])
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
