"""Pauses: each longer than the one before, and capped.

Between attempts they are jittered, downwards by up to a half: routers that lost the same thing at
the same moment must not ask for it again at the same moment.
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


class Suspension:
    """For how long something that was wrong is not relied on.

    Args:
        first_s: The first pause; each further one is twice as long.
        longest_s: The longest.
    """

    __slots__ = ("_first_s", "_longest_s", "_next_s", "_until_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s
        self._until_s = 0.0

    def begin(self, now_s: float) -> float:
        """Suspend from now on; return for how long."""
        pause_s = self._next_s
        self._until_s = now_s + pause_s
        self._next_s = min(pause_s * 2.0, self._longest_s)
        return pause_s

    def is_on(self, now_s: float) -> bool:
        """Return whether the last pause is not over."""
        return now_s < self._until_s

    def reset(self) -> None:
        """Have the next pause be as short as the first; one that is on goes on."""
        self._next_s = self._first_s
