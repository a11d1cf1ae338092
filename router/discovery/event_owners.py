"""Whose event endpoints the fleet's replicas use, kept up to date as replicas come and go."""

from __future__ import annotations

import time

from policies.view import CandidateId
from router.replicas.event_ports import EventOwners
from router.replicas.fleet import Fleet
from router.replicas.replica import Replica


class FleetEventOwners:
    """Finds candidates whose endpoints are another replica's. One for all replicas."""

    __slots__ = ("_fleet", "_known", "_owners")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: tuple[Replica, ...] = ()  # whose endpoints are in:
        self._owners = EventOwners(())

    def why_foreign(self, candidate: CandidateId) -> str | None:
        """Return why a candidate's events are not to be followed; None: they are its own."""
        replicas = self._fleet.members.replicas
        if replicas is not self._known:  # each replica's streams ask once a second
            self._known = replicas
            self._owners = EventOwners(r.event_ports for r in replicas if r.event_ports is not None)
        name, _, rank = candidate.partition("#")
        now_s = time.monotonic()
        return self._owners.why_foreign(
            name, int(rank or 0), counts=lambda other: self._fleet.members.is_up(other, now_s)
        )
