"""Pauses: each is twice as long as the one before, up to a limit.

Pauses between attempts have jitter, which shortens them by up to a half. So routers that lost the
same server do not all ask for it again at the same moment.

    Backoff      how long to wait between attempts (a connection, a task that failed)
    Suspension   until when something that was wrong is not relied on (a replica, a tokenizer)
    Suspects     suspensions by name, where one failure begins the pause and one success ends it

What shows that something is wrong differs: answers, votes of replicas, blocks that do not come. So
each user of a Suspension counts that itself; docs/contribute/architecture.md has a table of them.
"""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct

from router.base.bounded import Bounded

_MOST_SUSPECTS: Final = 1024  # names of replicas that are gone stay until then
_TRY_S: Final = 10.0  # others wait for the outcome of a try at most


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


class _Suspicion(Struct):
    since_s: float
    pause: Suspension
    tried_until_s: float = 0.0


class Suspects:
    """What failed, by name, and until when it is not relied on; times are monotonic seconds.

    An attempt that began before the present suspicion neither extends nor ends it. After a pause
    one attempt at a time is made: `began` makes others wait for its outcome.

    Args:
        first_s: The first pause; each further one is twice as long, until an attempt succeeds.
        longest_s: The longest.
    """

    __slots__ = ("_pauses_s", "_suspected")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._pauses_s = first_s, longest_s
        self._suspected: Bounded[str, _Suspicion] = Bounded(_MOST_SUSPECTS)

    def suspect(self, name: str, begun_s: float, now_s: float) -> bool:
        """Record an attempt that failed; False if it began before the present suspicion."""
        known = self._suspected.get(name) or _Suspicion(begun_s, Suspension(*self._pauses_s))
        if begun_s < known.since_s:
            return False
        self._suspected.put(name, known)
        known.since_s = now_s
        known.pause.begin(now_s)
        return True

    def is_suspect(self, name: str, now_s: float) -> bool:
        """Return whether it is not relied on now."""
        known = self._suspected.get(name)
        return known is not None and (known.pause.is_on(now_s) or now_s < known.tried_until_s)

    def began(self, name: str, now_s: float) -> None:
        """Record an attempt: the first after a pause makes others wait for it."""
        known = self._suspected.get(name)
        if known is not None and not known.pause.is_on(now_s):
            known.tried_until_s = now_s + _TRY_S

    def succeeded(self, name: str, begun_s: float) -> None:
        """Record an attempt that succeeded; it clears an older suspicion."""
        known = self._suspected.get(name)
        if known is not None and begun_s >= known.since_s:
            del self._suspected[name]
