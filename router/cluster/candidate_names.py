"""What routers call each other's candidates: a feed's name for a candidate, and back.

Two routers may number their replicas differently (`r1` here is `r2` there), so a feed is named by
the replica's identity (its given name, else its base URL) and rank: `east#0`,
`http://10.0.0.5:8000#2`. The rank is always said, whether or not there are others.
"""

from __future__ import annotations

from policies.view import CandidateId
from router.messages import FeedId
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidate_id


class Feeds:
    """Translates both ways, as the registry and the fleet are at the moment."""

    __slots__ = ("_fleet", "_registry")

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet

    def feed_of(self, candidate: CandidateId) -> FeedId | None:
        """Name a candidate's feed; None: its replica is not in the registry (any more)."""
        name, _, rank = candidate.partition("#")
        entry = self._registry.find(name)
        return FeedId(f"{entry.identity}#{rank or 0}") if entry is not None else None

    def candidate_of(self, feed: FeedId) -> CandidateId | None:
        """Find a feed's candidate; None: there is none here (yet)."""
        identity, _, rank = feed.rpartition("#")
        entry = self._registry.of_identity(identity)
        if entry is None:
            return None
        ranked = candidate_id(entry.name, int(rank)) if rank.isascii() and rank.isdigit() else None
        if ranked is not None and self._fleet.has(ranked):
            return ranked
        alone = candidate_id(entry.name, None)
        return alone if rank == "0" and self._fleet.has(alone) else None
