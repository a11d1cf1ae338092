"""How many requests may be sent a second time: a share of the recent ones, and a few.

Without a bound a fleet that fails is asked twice for everything, and fails for longer. But what
a replica loses at once (it died with sixty requests in it, or its pool's objects are gone) is one
loss, and each of these is sent once more at most: they count as one.
"""

from __future__ import annotations

from typing import Final

from router.replicas.recent import RecentSum

WINDOW_S: Final = 10.0
NUM_ALWAYS: Final = 10  # in a window: a share of little traffic is nothing
AT_ONCE_S: Final = 5.0


class RetryBudget:
    """Counts requests and what was sent again.

    Args:
        ratio: Share of recent requests that may be sent again.
    """

    __slots__ = ("_losses", "_ratio", "_requests", "_retries")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._requests = RecentSum(WINDOW_S)
        self._retries = RecentSum(WINDOW_S)
        self._losses: dict[str, float] = {}  # replica -> when what it last lost began to fail

    def note_request(self, now_s: float) -> None:
        self._requests.add(1.0, now_s)

    def can_take(self, replica: str, begun_s: float, now_s: float) -> bool:
        """Return whether what was sent to `replica` at `begun_s` and failed may be sent again."""
        if self._is_same_loss(replica, begun_s, now_s):
            return True
        allowed = NUM_ALWAYS + self._ratio * self._requests.at(now_s)
        return self._retries.at(now_s) + 1.0 <= allowed

    def take(self, replica: str, begun_s: float, now_s: float) -> None:
        """Count a request that is sent again; arguments as of `can_take`."""
        if not self._is_same_loss(replica, begun_s, now_s):
            self._losses[replica] = now_s
            self._retries.add(1.0, now_s)

    def _is_same_loss(self, replica: str, begun_s: float, now_s: float) -> bool:
        lost_s = self._losses.get(replica)
        return lost_s is not None and begun_s <= lost_s and now_s < lost_s + AT_ONCE_S
