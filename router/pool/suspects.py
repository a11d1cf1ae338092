"""Candidates whose reads from the pool hang or fail: suspect for a while.

Real Mooncake reads over TCP hung for 60 s. Blocks that such a candidate holds itself still count;
blocks to fetch do not, until a fetch succeeds there or a pause is over, longer each time.
"""

from __future__ import annotations

from typing import Final

from policies.view import CandidateId

_PAUSE_S: Final = (10.0, 300.0)


class PoolSuspects:
    """The suspects, and until when; times are monotonic seconds."""

    __slots__ = ("_suspected",)

    def __init__(self) -> None:
        self._suspected: dict[CandidateId, tuple[float, int]] = {}  # until when, how often in a row

    def suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Note a read that hung or failed; False if the candidate was suspect already."""
        until_s, times = self._suspected.get(candidate, (0.0, 0))
        if now_s < until_s:
            return False  # sent before it became suspect
        shortest_s, longest_s = _PAUSE_S
        pause_s = min(longest_s, shortest_s * 2.0 ** min(times, 10))
        self._suspected[candidate] = now_s + pause_s, times + 1
        return True

    def is_suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Return whether fetches there are not to be counted on now."""
        entry = self._suspected.get(candidate)
        return entry is not None and now_s < entry[0]

    def clear(self, candidate: CandidateId) -> None:
        """Note that a fetch succeeded, or that another process answers there now."""
        self._suspected.pop(candidate, None)
