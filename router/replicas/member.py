"""One replica of the fleet, with its moving state."""

from __future__ import annotations

from policies.view import CandidateId
from router.replicas.candidate_state import CandidateState
from router.replicas.cost_classes import Speed
from router.replicas.health import Health
from router.replicas.replica import Replica
from router.replicas.signs import Signs


class Member:
    """A replica, and all that stays with its name until it is another server."""

    __slots__ = ("health", "replica", "signs", "speed", "states")

    def __init__(self, replica: Replica, health: Health, speed: Speed) -> None:
        self.replica = replica
        self.health = health
        self.signs = Signs()
        self.speed = speed
        self.states: dict[CandidateId, CandidateState] = {}
