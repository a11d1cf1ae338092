"""Tenants share what the engines compute, by weight, while more than one of them waits.

Each tenant has some compute left of the present round, at first its weight times the quantum. What
is sent of it takes from that what has to be computed; what is cached is free, so caches keep their
worth. A tenant with nothing left goes behind those with some. When none of those that wait has any
left, the next round begins: each gets its part, less what it took too much. A tenant that does not
wait saves nothing up.

Source: deficit longest prefix match (DLPM, arXiv 2501.14312), in time instead of tokens.
"""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """What each tenant has left of a round.

    Args:
        quantum_ms: Compute of one round for a weight of 1.
    """

    __slots__ = ("_left_ms", "_quantum_ms", "_weights")

    def __init__(self, quantum_ms: float) -> None:
        self._quantum_ms = quantum_ms
        self._left_ms: dict[str, float] = {}  # of those that do not have all of a round's
        self._weights: dict[str, float] = {}  # of the same

    def is_spent(self, tenant: str) -> bool:
        """Return whether a tenant has nothing left of this round."""
        left_ms = self._left_ms.get(tenant)
        return left_ms is not None and left_ms <= 0.0

    def charge(
        self, tenant: str, weight: float, compute_ms: float, waiting: Collection[str]
    ) -> list[str]:
        """Take what is sent from a tenant's share; return those that are spent now or no more.

        Args:
            waiting: The tenants that have something to send, this one if it has more.
        """
        was_spent = self.is_spent(tenant)
        part_ms = weight * self._quantum_ms
        self._weights[tenant] = weight
        self._left_ms[tenant] = self._left_ms.get(tenant, part_ms) - compute_ms
        if waiting and all(map(self.is_spent, waiting)):
            changed = self._begin_round(waiting)
            if not was_spent and self.is_spent(tenant):
                changed.append(tenant)
            elif not was_spent and tenant in changed:
                changed.remove(tenant)  # spent, and not any more
            return changed
        return [tenant] if self.is_spent(tenant) is not was_spent else []

    def _begin_round(self, waiting: Collection[str]) -> list[str]:
        """Begin as many rounds as it takes until one who waits has something left."""
        num_rounds = min(
            -self._left_ms[tenant] // (self._weights[tenant] * self._quantum_ms) + 1.0
            for tenant in waiting
        )
        changed = []
        for tenant, left_ms in list(self._left_ms.items()):
            part_ms = self._weights[tenant] * self._quantum_ms
            now_ms = left_ms + num_rounds * part_ms
            if left_ms <= 0.0 < now_ms:
                changed.append(tenant)
            if now_ms >= part_ms:
                del self._left_ms[tenant], self._weights[tenant]
            else:
                self._left_ms[tenant] = now_ms
        return changed
