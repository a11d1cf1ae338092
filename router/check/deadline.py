"""The time limit of a check."""

from __future__ import annotations

import time


class Deadline:
    """When a check ends."""

    __slots__ = ("_at_s",)

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """The remaining time, at least 0."""
        return max(0.0, self._at_s - time.monotonic())

    def at_most(self, timeout_s: float) -> float:
        """Shorten a timeout to the remaining time; always above 0."""
        return max(0.01, min(timeout_s, self.left_s))
