"""The time limit of a check, and the systems that it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Deadline:
    """When a check ends, and the systems that have not answered yet."""

    __slots__ = ("_at_s", "_waiting")

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s
        self._waiting: dict[str, int] = {}

    @property
    def left_s(self) -> float:
        """The remaining time, at least 0."""
        return max(0.0, self._at_s - time.monotonic())

    def at_most(self, timeout_s: float) -> float:
        """Shorten a timeout to the remaining time; always above 0."""
        return max(0.01, min(timeout_s, self.left_s))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count a system as awaited while the block runs."""
        self._waiting[what] = self._waiting.get(what, 0) + 1
        try:
            yield
        finally:
            self._waiting[what] -= 1
            if not self._waiting[what]:
                del self._waiting[what]

    def awaited(self) -> list[str]:
        """List the awaited systems."""
        return list(self._waiting)
