"""How many requests may be sent a second time: a share of the recent ones, and a few more.

Without a bound a failing fleet receives everything twice, and fails for longer. Requests that a
replica loses at the same time count as one loss: it died with sixty requests, or its pool's objects
are gone. Each of these is sent once more at most.
"""

from __future__ import annotations

from typing import Final

from router.base.bounded import RecentSum

WINDOW_S: Final = 10.0
NUM_ALWAYS: Final = 10  # in a window: a share of little traffic is nothing
AT_ONCE_S: Final = 5.0


class RetryBudget:
    """Counts requests and retries.

    requests: How many came recently; each adds 1.

    Args:
        ratio: Share of recent requests that may be sent again.
    """

    __slots__ = ("_losses", "_ratio", "_retries", "requests")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.requests = RecentSum(WINDOW_S)
        self._retries = RecentSum(WINDOW_S)
        self._losses: dict[str, float] = {}  # replica -> when its last loss began

    def can_take(self, replica: str, begun_s: float, now_s: float) -> bool:
        """Return whether a failed request, sent to `replica` at `begun_s`, may be sent again."""
        if self._is_same_loss(replica, begun_s, now_s):
            return True
        allowed = NUM_ALWAYS + self._ratio * self.requests.at(now_s)
        return self._retries.at(now_s) + 1.0 <= allowed

    def take(self, replica: str, begun_s: float, now_s: float) -> bool:
        """Count a request that is sent again; arguments as of `can_take`. False: it was counted."""
        if self._is_same_loss(replica, begun_s, now_s):
            return False
        self._losses[replica] = now_s
        self._retries.add(1.0, now_s)
        return True

    def give_back(self, replica: str, now_s: float) -> None:
        """Take back a request that counted, and is not sent again."""
        self._losses.pop(replica, None)
        self._retries.add(-1.0, now_s)

    def _is_same_loss(self, replica: str, begun_s: float, now_s: float) -> bool:
        lost_s = self._losses.get(replica)
        return lost_s is not None and begun_s <= lost_s and now_s < lost_s + AT_ONCE_S
