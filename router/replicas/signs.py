"""Signs that a replica is alive and at work, for requests whose answer is silent.

    alive     bytes of any of its answers come, keep-alive comments included
    at work   its figures (/metrics) moved between two readings, and it has all requests that were
              sent to it; if it shows no figures: its other answers go on

The router waits for a replica that is at work. A tool call that a parser holds back is silent for
minutes, and an answer without a stream is silent until its end. The figures of an engine that hangs
stand still. An engine that has lost a request has fewer than were sent.

What must live here: what was seen, and how long that excuses a silence. What must not: health.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

_LOOK_S: Final = 0.05
_MOST_LOOKING_S: Final = 5.0


class Figures(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine shows of its work, all ranks together."""

    num_requests: int  # running and waiting
    progress: tuple[float, ...]  # numbers that move while it works


def _ignore() -> None:
    """Read no figures."""


class Signs:
    """Signs of one replica. Times are monotonic seconds.

    alive_s: When bytes of an answer came last.
    said_s: When more than a keep-alive comment of an answer came last.
    has_broken: A request failed there as it does when a replica dies.
    on_doubt: Called when it should be probed, or its figures read, at once.
    """

    __slots__ = ("_figures", "_read_s", "_worked_s", "alive_s", "has_broken", "on_doubt", "said_s")

    def __init__(self) -> None:
        self.alive_s = self.said_s = 0.0
        self.has_broken = False
        self.on_doubt: Callable[[], None] = _ignore
        self._figures: Figures | None = None  # as of the last reading; None: it showed none
        self._read_s = self._worked_s = 0.0

    def broke(self) -> None:
        """Note that a request failed as it does when a replica dies: is that still there?"""
        self.has_broken = True
        self.on_doubt()

    def read(self, figures: Figures | None, num_sent: int, now_s: float) -> None:
        """Take over a reading.

        Args:
            figures: None: there are none.
            num_sent: Requests that were sent there and have not ended.
            now_s: Now.
        """
        last, self._figures, self._read_s = self._figures, figures, now_s
        if figures is None or figures.num_requests < max(1, num_sent):
            return
        if last is None or last.progress != figures.progress:
            self._worked_s = now_s

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
