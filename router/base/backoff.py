"""Pauses: each is twice as long as the one before, up to a limit.

Pauses between attempts have jitter, which shortens them by up to a half. So routers that lost the
same server do not all ask for it again at the same moment.

    Backoff      how long to wait between attempts (a connection, a task that failed)
    Suspension   until when something that was wrong is not relied on (a replica, a tokenizer)
"""

from __future__ import annotations

import random


class Backoff:
    """The pauses between attempts at one thing.

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
        """Start with the first pause again, after some success."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause, in (longest_s / 2, longest_s] once it has grown."""
        pause_s = self._next_s
        self._next_s = min(pause_s * 2.0, self._longest_s)
        return pause_s * random.uniform(0.5, 1.0)


class Suspension:
    """Until when something that was wrong is not relied on.

    Args:
        first_s: The first pause; each further one is twice as long.
        longest_s: The longest.
    """

    __slots__ = ("_first_s", "_longest_s", "_next_s", "until_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = min(first_s, longest_s)
        self.until_s = 0.0  # when the last pause is over

    def begin(self, now_s: float, *, jitter: float = 1.0) -> float:
        """Suspend from now on; return for how long.

        `jitter`: in [0, 1]; 0 halves the pause.
        """
        pause_s = self._next_s * (0.5 + 0.5 * jitter)
        self.until_s = now_s + pause_s
        self._next_s = min(self._next_s * 2.0, self._longest_s)
        return pause_s

    def is_on(self, now_s: float) -> bool:
        """Return whether the last pause is not over."""
        return now_s < self.until_s

    def reset(self) -> None:
        """Make the next pause as short as the first; the current one goes on."""
        self._next_s = self._first_s
