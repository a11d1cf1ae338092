"""Which candidates read the shared pool: configured, or learned from what they report.

An engine does not say whether it has a connector. With a pool configured each is taken to read it,
until its reports deny it: fetches were predicted, several in a row, and none happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.view import CandidateId

_MISSES: Final = 5


class PoolReaders:
    """What is believed of each candidate.

    Args:
        configured: Replica name to what the configuration says; others are learned.
    """

    __slots__ = ("_configured", "_detached", "_misses")

    def __init__(self, configured: Mapping[str, bool] | None = None) -> None:
        self._configured = dict(configured or {})
        self._misses: dict[CandidateId, int] = {}  # in a row
        self._detached: set[CandidateId] = set()

    def reads(self, candidate: CandidateId) -> bool:
        """Tell whether the candidate fetches from the pool what it lacks."""
        configured = self.is_configured(candidate)
        return candidate not in self._detached if configured is None else configured

    def is_configured(self, candidate: CandidateId) -> bool | None:
        """Return what the configuration says; None: nothing."""
        return self._configured.get(candidate.partition("#")[0])

    def detached(self) -> list[CandidateId]:
        """List the candidates that were found not to read the pool."""
        return sorted(self._detached)

    def observe(
        self,
        candidate: CandidateId,
        *,
        num_own_tokens: int,
        num_pool_tokens: int,
        num_reported: int,
    ) -> bool | None:
        """Learn from one answer; return what is newly believed, None: as before.

        Args:
            candidate: Who answered.
            num_own_tokens: Leading tokens it was predicted to hold itself.
            num_pool_tokens: Leading tokens predicted in the pool.
            num_reported: Cached tokens it reports.
        """
        if num_pool_tokens <= num_own_tokens or self.is_configured(candidate) is not None:
            return None
        if num_reported > num_own_tokens:
            self._misses.pop(candidate, None)
            if candidate in self._detached:
                self._detached.discard(candidate)
                return True
            return None
        misses = self._misses[candidate] = self._misses.get(candidate, 0) + 1
        if misses < _MISSES or candidate in self._detached:
            return None
        self._detached.add(candidate)
        return False

    def forget(self, candidate: CandidateId) -> None:
        """Begin anew: another process answers there now."""
        self._misses.pop(candidate, None)
        self._detached.discard(candidate)
