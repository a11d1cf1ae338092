"""Signs that a replica is alive and at work, for requests whose answer is silent.

    alive     its answers go on, or its figures (/metrics) changed between two readings
    at work   its figures moved, and it has all requests that were sent to it; if it shows no
              figures: its other answers go on
    stalled   requests wait for a first byte, and it has not shown that it is alive for a while

The router waits for a replica that is at work. A tool call that a parser holds back is silent for
minutes, and an answer without a stream is silent until its end. The figures of an engine that hangs
stand still. An engine that has lost a request has fewer than were sent. Keep-alive comments are no
sign: an API server writes them whatever its engine does.

An engine shows a request with the end of its first step. If that step never ends, its figures say
that it is idle. If they show requests and stand still, it is waited for longer: a step may be long,
or its requests wait for KV. One that sleeps, or waits for prompts of others, is excused.

What must live here: what was seen, and how long that excuses a silence. What must not: health.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

STALLED_S: Final = 20.0
"""The least time without activity after which a replica that seems idle has stalled."""

_FROZEN_RATIO: Final = 3.0  # of that time, if its figures show requests
_LEARNED_RATIO: Final = 2.0  # of the longest time after which it went on by itself
_MOST_S: Final = 120.0
_LOOK_S: Final = 0.05
_MOST_LOOKING_S: Final = 3.0


class Figures(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine shows of its work, all ranks together."""

    num_requests: int  # running and waiting
    progress: tuple[float, ...]  # numbers that move while it works


def _ignore() -> None:
    """Read no figures."""


class Signs:
    """Signs of one replica. Times are monotonic seconds.

    asked_s: Since when requests wait there for a first byte, without a moment in which none did.
        None: none waits.
    overdue_s: Since when one waited that left because it was overdue, with no activity since.
    said_s: When more than a keep-alive comment of an answer came last.
    moved_s: When a reading last had other figures than the one before.
    has_broken: A request failed there as it does when a replica dies.
    on_doubt: Called when it should be probed, or its figures read, at once.
    """

    __slots__ = (
        "_excused_s",
        "_figures",
        "_longest_s",
        "_quiet_s",
        "_read_s",
        "_seen_s",
        "_worked_s",
        "asked_s",
        "has_broken",
        "moved_s",
        "on_doubt",
        "overdue_s",
        "said_s",
    )

    def __init__(self) -> None:
        self.asked_s: float | None = None
        self.overdue_s: float | None = None
        self.said_s = self.moved_s = 0.0
        self.has_broken = False
        self.on_doubt: Callable[[], None] = _ignore
        self._figures: Figures | None = None  # as of the last reading; None: it showed none
        self._read_s = self._worked_s = self._seen_s = self._excused_s = 0.0
        self._quiet_s: float | None = None  # since when it shows no activity though requests wait
        self._longest_s = 0.0  # that it showed none, and then went on

    @property
    def alive_s(self) -> float:
        """When it last showed that it is alive."""
        return max(self.said_s, self.moved_s)

    def broke(self) -> None:
        """Record that a request failed as at a dying replica, and ask whether it is still there."""
        self.has_broken = True
        self.on_doubt()

    def read(
        self, figures: Figures | None, num_sent: int, now_s: float, *, is_excused: bool = False
    ) -> bool | None:
        """Record a reading; return whether it has stalled. None: nothing shows either.

        Args:
            figures: None: there are none.
            num_sent: Requests that were sent there and have not ended.
            now_s: Now.
            is_excused: It computes nothing for a reason that is known.
        """
        last, self._figures, last_read_s, self._read_s = self._figures, figures, self._read_s, now_s
        if figures is None:
            return None
        if last is not None and last != figures:
            self.moved_s = now_s
        if figures.num_requests >= max(1, num_sent):
            if last is None:
                self._worked_s = now_s  # it may have moved since it was asked
            elif last.progress != figures.progress:
                self._worked_s = self._seen_s = now_s
        if self.alive_s > last_read_s:
            self._longest_s = max(self._longest_s, self.quiet_s(now_s))
            self._quiet_s = self.overdue_s = None
            return False
        if is_excused:
            self._excused_s = now_s
        since = [each for each in (self.asked_s, self.overdue_s) if each is not None]
        if last is None or not since:
            self._quiet_s = None
            return None
        self._quiet_s = max(min(since), self.alive_s, self._excused_s)
        limit_s = max(STALLED_S, min(_LEARNED_RATIO * self._longest_s, _MOST_S))
        if figures.num_requests:
            limit_s *= _FROZEN_RATIO
        return True if now_s - self._quiet_s >= limit_s else None

    def quiet_s(self, now_s: float) -> float:
        """Return for how long it has shown no activity although requests wait."""
        return now_s - self._quiet_s if self._quiet_s is not None else 0.0

    def works_since(self, since_s: float) -> bool | None:
        """Return whether it was seen at work since then. None: it shows no figures."""
        if self._figures is None:
            return None
        return self._seen_s > since_s

    def wait_s(self, since_s: float, limit_s: float, now_s: float) -> float | None:
        """Return how long to wait for an answer that is silent since then; None: no longer.

        The wait ends once the replica has not been seen at work for `limit_s` either. Before that
        its figures are read once more: readings may be further apart than the limit.
        """
        last_s = max(since_s, self._worked_s)
        if self._figures is None:
            last_s = max(last_s, self.said_s)
        due_s = last_s + limit_s
        if now_s < due_s:
            return due_s - now_s
        if self._read_s >= due_s or now_s >= due_s + min(limit_s, _MOST_LOOKING_S):
            return None
        self.on_doubt()
        return _LOOK_S
