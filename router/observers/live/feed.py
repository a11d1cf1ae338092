"""Finished requests, for those who watch. A slow listener loses the oldest, which is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from router.base.errors import Overloaded
from router.records.record import DecisionRecord
from router.request.observer import Observer

MAX_LISTENERS: Final = 16


class Listener:
    """What one listener has not taken yet.

    num_lost: Records that were dropped because too many waited.
    """

    __slots__ = ("_waiting", "num_lost")

    def __init__(self, max_waiting: int) -> None:
        self._waiting: deque[DecisionRecord] = deque(maxlen=max_waiting)
        self.num_lost = 0

    def put(self, record: DecisionRecord) -> None:
        """Add a record; the oldest makes room for it."""
        self.num_lost += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(record)

    def take(self, most: int) -> list[DecisionRecord]:
        """Take so many records at most, oldest first."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


class Feed(Observer):
    """Hands each finished request to the listeners. Call from one thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        """Count the listeners."""
        return len(self._listeners)

    def recorded(self, record: DecisionRecord) -> None:
        """Hand out a record."""
        for listener in self._listeners:
            listener.put(record)

    @contextmanager
    def subscribe(self, max_waiting: int) -> Iterator[Listener]:
        """Listen within the block.

        Raises:
            Overloaded: too many listen already.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listeners follow the live feed; that is the limit")
        listener = Listener(max_waiting)
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
