"""Candidates whose reads from the pool hang or fail: not counted on for a while.

Real Mooncake reads over TCP hung for 60 s. What such a candidate holds itself still counts; what it
would have to fetch does not, until a fetch succeeds there or a pause is over, longer each time.
"""

from __future__ import annotations

from typing import Final

from policies.view import CandidateId

_PAUSE_S: Final = (10.0, 300.0)


class PoolSuspects:
    """Who is suspected, until when; times are monotonic seconds."""

    __slots__ = ("_suspected",)

    def __init__(self) -> None:
        self._suspected: dict[CandidateId, tuple[float, int]] = {}  # until when, how often in a row

    def suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Count a read that hung or failed; False if the candidate was suspected already."""
        until_s, times = self._suspected.get(candidate, (0.0, 0))
        if now_s < until_s:
            return False  # of the same time: sent before
        shortest_s, longest_s = _PAUSE_S
        pause_s = min(longest_s, shortest_s * 2.0 ** min(times, 10))
        self._suspected[candidate] = now_s + pause_s, times + 1
        return True

    def is_suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Say whether fetches there are not to be counted on now."""
        entry = self._suspected.get(candidate)
        return entry is not None and now_s < entry[0]

    def clear(self, candidate: CandidateId) -> None:
        """Note that a fetch succeeded, or that another process answers there now."""
        self._suspected.pop(candidate, None)
