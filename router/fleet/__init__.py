"""The fleet: replicas, their load, their health, their speed, and the sessions that use them.

State, synchronous; `now_s` is an argument; no I/O. `Fleet` is the way in.
"""

from router.fleet.fleet import Fleet
from router.fleet.health import HealthRules, Outcome, ProbeFailure, State
from router.fleet.ledger import Lease
from router.fleet.replica import Candidate, Replica, ServedModel
from router.fleet.sessions import Sessions, SessionView
from router.fleet.slot import NO_MATCH, CandidateStatus, EngineLoad, Match

__all__ = [
    "NO_MATCH",
    "Candidate",
    "CandidateStatus",
    "EngineLoad",
    "Fleet",
    "HealthRules",
    "Lease",
    "Match",
    "Outcome",
    "ProbeFailure",
    "Replica",
    "ServedModel",
    "SessionView",
    "Sessions",
    "State",
]
