"""What routers call each other's candidates: a candidate's stream id, and back.

Two routers may number their replicas differently: `r1` here is `r2` there. So a stream's id is the
replica's identity and the rank: `east#0`, `http://10.0.0.5:8000#2`. The identity is the replica's
name, or else its base URL. The rank is always part of it.
"""

from __future__ import annotations

from policies.view import CandidateId
from router.base.messages import StreamId
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidate_id


class CandidateNames:
    """Translates both ways, as the registry and the fleet are at the moment."""

    __slots__ = ("_fleet", "_registry")

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet

    def stream_id_of(self, candidate: CandidateId) -> StreamId | None:
        """Find a candidate's stream id; None: its replica is not in the registry (any more)."""
        name, _, rank = candidate.partition("#")
        entry = self._registry.find(name)
        return StreamId(f"{entry.identity}#{rank or 0}") if entry is not None else None

    def candidate_of(self, stream_id: StreamId) -> CandidateId | None:
        """Find a stream's candidate; None: there is none here (yet)."""
        identity, _, rank = stream_id.rpartition("#")
        entry = self._registry.of_identity(identity)
        if entry is None:
            return None
        ranked = candidate_id(entry.name, int(rank)) if rank.isascii() and rank.isdigit() else None
        if ranked is not None and ranked in self._fleet.members.states:
            return ranked
        alone = candidate_id(entry.name, None)
        return alone if rank == "0" and alone in self._fleet.members.states else None
