"""Candidates whose reads from the pool hang or fail: suspect for a while.

Real Mooncake reads over TCP hung for 60 s. Blocks that such a candidate holds itself still count;
blocks to fetch do not until a read that began after the suspicion has succeeded. Engines look into
the pool whatever is counted on, so any request may be it; after a pause, longer each time, one
request at a time is sent to try.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from policies.view import CandidateId

_PAUSE_S: Final = (10.0, 300.0)


class _Suspicion(Struct):
    since_s: float
    until_s: float  # or until a try is over
    times: int  # in a row


class PoolSuspects:
    """The suspects, and until when; times are monotonic seconds."""

    __slots__ = ("_suspected",)

    def __init__(self) -> None:
        self._suspected: dict[CandidateId, _Suspicion] = {}

    def suspect(self, candidate: CandidateId, begun_s: float, now_s: float) -> bool:
        """Note a read that hung or failed; False if it began before the candidate was suspect."""
        known = self._suspected.get(candidate)
        if known is not None and begun_s < known.since_s:
            return False
        times = known.times if known is not None else 0
        shortest_s, longest_s = _PAUSE_S
        pause_s = min(longest_s, shortest_s * 2.0 ** min(times, 10))
        self._suspected[candidate] = _Suspicion(now_s, now_s + pause_s, times + 1)
        return True

    def is_suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Return whether fetches there are not to be counted on now."""
        known = self._suspected.get(candidate)
        return known is not None and now_s < known.until_s

    def began(self, candidate: CandidateId, now_s: float) -> None:
        """Note a read that is counted on: if it is the first after a pause, others wait for it."""
        known = self._suspected.get(candidate)
        if known is not None and now_s >= known.until_s:
            known.until_s = now_s + _PAUSE_S[0]

    def succeeded(self, candidate: CandidateId, begun_s: float) -> None:
        """Note a read that succeeded in its time; it clears a suspicion older than the read."""
        known = self._suspected.get(candidate)
        if known is not None and begun_s >= known.since_s:
            del self._suspected[candidate]
