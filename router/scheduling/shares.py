"""Callers share the compute of the replicas by weight while several of them wait.

Each caller may use its weight times the quantum in a round. Each sent request takes the compute of
its prompt from that. Cached tokens are free, so caches keep their value. A caller that has used its
share goes behind the others. When every waiting caller has used its share, the next round begins.
A caller that used too much gets less of it. A caller that does not wait saves nothing.

Source: deficit longest prefix match (DLPM, arXiv 2501.14312), in time instead of tokens.
"""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """Compute that each caller has left of a round.

    Args:
        quantum_ms: Compute of one round for a weight of 1.
    """

    __slots__ = ("_left_ms", "_quantum_ms", "_weights")

    def __init__(self, quantum_ms: float) -> None:
        self._quantum_ms = quantum_ms
        self._left_ms: dict[str | None, float] = {}  # only callers that used a part of their share
        self._weights: dict[str | None, float] = {}  # of the same callers

    def is_spent(self, caller: str | None) -> bool:
        """Return whether a caller has used its share of this round."""
        return self._left_ms.get(caller, 1.0) <= 0.0

    def charge(
        self, caller: str | None, weight: float, compute_ms: float, waiting: Collection[str | None]
    ) -> bool:
        """Charge a sent request to a caller's share; return whether any caller's state changed.

        Args:
            waiting: The callers that have requests in the queue.
        """
        spent_before = self._spent()
        share_ms = weight * self._quantum_ms
        self._weights[caller] = weight
        self._left_ms[caller] = self._left_ms.get(caller, share_ms) - compute_ms
        if waiting and all(map(self.is_spent, waiting)):
            self._begin_round(waiting)
        return self._spent() != spent_before

    def _spent(self) -> set[str | None]:
        return {caller for caller, left_ms in self._left_ms.items() if left_ms <= 0.0}

    def _begin_round(self, waiting: Collection[str | None]) -> None:
        """Begin as many rounds as it takes until one of the waiting callers has a share left."""
        num_rounds = min(
            -self._left_ms[caller] // (self._weights[caller] * self._quantum_ms) + 1.0
            for caller in waiting
        )
        for caller, left_ms in list(self._left_ms.items()):
            share_ms = self._weights[caller] * self._quantum_ms
            if left_ms + num_rounds * share_ms >= share_ms:
                del self._left_ms[caller], self._weights[caller]
            else:
                self._left_ms[caller] = left_ms + num_rounds * share_ms
