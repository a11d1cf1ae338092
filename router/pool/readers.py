"""Which candidates read the shared pool: configured, or learned from their answers.

An engine does not report whether it reads the pool. A member of a pool counts as a reader until
several predicted fetches in a row did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.view import CandidateId

_MISSES: Final = 5


class PoolReaders:
    """Which candidates count as readers of the pool.

    Args:
        configured: Replica name to whether it reads the pool; others are learned.
    """

    __slots__ = ("_configured", "_detached", "_misses")

    def __init__(self, configured: Mapping[str, bool] | None = None) -> None:
        self._configured = dict(configured or {})
        self._misses: dict[CandidateId, int] = {}  # in a row
        self._detached: set[CandidateId] = set()

    def reads(self, candidate: CandidateId) -> bool:
        """Return whether the candidate fetches from the pool."""
        configured = self.is_configured(candidate)
        return candidate not in self._detached if configured is None else configured

    def is_configured(self, candidate: CandidateId) -> bool | None:
        """Return what is configured; None: nothing."""
        return self._configured.get(candidate.partition("#")[0])

    def configure(self, replica: str, reads: bool | None) -> None:
        """Set what is configured for a replica; None: nothing."""
        if reads is None:
            self._configured.pop(replica, None)
        else:
            self._configured[replica] = reads

    def detached(self) -> list[CandidateId]:
        """List the candidates that did not read the pool."""
        return sorted(self._detached)

    def observe(
        self,
        candidate: CandidateId,
        *,
        num_own_tokens: int,
        num_pool_tokens: int,
        num_reported: int,
    ) -> bool | None:
        """Record one answer; return whether it reads the pool if that changed, else None.

        Args:
            candidate: The one that answered.
            num_own_tokens: Leading tokens predicted in its own cache.
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
        """Forget what was learned: another process answers there now."""
        self._misses.pop(candidate, None)
        self._detached.discard(candidate)
