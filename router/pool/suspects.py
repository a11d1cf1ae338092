"""Candidates whose reads from the pool hang or fail, and are suspect for a while.

Real Mooncake reads over TCP hung for 60 s. Blocks in such a candidate's own cache still count.
Blocks to fetch do not, until a read that began after the suspicion has succeeded. Engines look into
the pool for every request, so any request may be that read. After a pause, longer each time, one
request at a time is sent to try.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.base.backoff import Suspension

_PAUSE_S: Final = (10.0, 300.0)
_TRY_S: Final = 10.0  # others wait for the outcome of a try at most


class _Suspicion(Struct):
    since_s: float
    pause: Suspension
    tried_until_s: float = 0.0


class PoolSuspects:
    """The suspects, and until when; times are monotonic seconds."""

    __slots__ = ("_suspected",)

    def __init__(self) -> None:
        self._suspected: dict[CandidateId, _Suspicion] = {}

    def suspect(self, candidate: CandidateId, begun_s: float, now_s: float) -> bool:
        """Record a read that hung or failed; False if it began before the present suspicion."""
        known = self._suspected.setdefault(candidate, _Suspicion(begun_s, Suspension(*_PAUSE_S)))
        if begun_s < known.since_s:
            return False
        known.since_s = now_s
        known.pause.begin(now_s)
        return True

    def is_suspect(self, candidate: CandidateId, now_s: float) -> bool:
        """Return whether fetches there do not count now."""
        known = self._suspected.get(candidate)
        return known is not None and (known.pause.is_on(now_s) or now_s < known.tried_until_s)

    def began(self, candidate: CandidateId, now_s: float) -> None:
        """Record a read that counts: the first after a pause makes others wait for it."""
        known = self._suspected.get(candidate)
        if known is not None and not known.pause.is_on(now_s):
            known.tried_until_s = now_s + _TRY_S

    def succeeded(self, candidate: CandidateId, begun_s: float) -> None:
        """Record a read that succeeded; it clears a suspicion that is older than the read."""
        known = self._suspected.get(candidate)
        if known is not None and begun_s >= known.since_s:
            del self._suspected[candidate]
