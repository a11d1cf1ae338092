"""Pauses between attempts: each longer than the one before, capped, jittered.

Jitter goes downwards, by up to a half: routers that lost the same thing at the same moment must not
ask for it again at the same moment.
"""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one thing that is tried again and again.

    Args:
        first_s: The first pause; each further one is twice as long.
        longest_s: The longest.
    """

    __slots__ = ("_first_s", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """Start with the first pause again: it went well for a while."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause, in (longest_s / 2, longest_s] once it has grown."""
        pause_s = self._next_s
        self._next_s = min(pause_s * 2.0, self._longest_s)
        return pause_s * random.uniform(0.5, 1.0)
