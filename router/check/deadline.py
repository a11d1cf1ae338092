"""How long a check may take, and what it still waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Deadline:
    """The end of a check, and what is being looked at, so that people can see what it waits for."""

    __slots__ = ("_at_s", "_waiting")

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s
        self._waiting: dict[str, int] = {}

    @property
    def left_s(self) -> float:
        """Time that is left, never less than 0."""
        return max(0.0, self._at_s - time.monotonic())

    def at_most(self, timeout_s: float) -> float:
        """Shorten a timeout to what is left; a little above 0 at least."""
        return max(0.01, min(timeout_s, self.left_s))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """List `what` as awaited while the block runs."""
        self._waiting[what] = self._waiting.get(what, 0) + 1
        try:
            yield
        finally:
            self._waiting[what] -= 1
            if not self._waiting[what]:
                del self._waiting[what]

    def awaited(self) -> list[str]:
        """List what is being looked at."""
        return list(self._waiting)
