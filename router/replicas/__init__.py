"""The fleet: replicas, their load, their health, their speed, and the sessions that use them.

State, synchronous; `now_s` is an argument; no I/O. `Fleet` is the way in.
"""

from router.replicas.candidate_state import CandidateStatus, EngineLoad
from router.replicas.fleet import Fleet
from router.replicas.health import HealthRules, HealthState, ProbeFailure
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate, Replica, ServedModel
from router.replicas.sessions import Sessions, SessionView

__all__ = [
    "Booking",
    "Candidate",
    "CandidateStatus",
    "EngineLoad",
    "Fleet",
    "HealthRules",
    "HealthState",
    "Lease",
    "ProbeFailure",
    "Replica",
    "ServedModel",
    "SessionView",
    "Sessions",
]
