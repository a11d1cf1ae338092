"""The fleet: replicas, their load, their health, their speed, and the conversations that use them.

State, synchronous; `now_s` is an argument; no I/O. `Fleet` is the way in: members, offers, load.
"""

from router.replicas.candidate_state import CandidateStatus, EngineLoad
from router.replicas.fleet import Fleet
from router.replicas.health import HealthRules, HealthState, ProbeFailure
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate, Replica, ServedModel
from router.scheduling.conversations import Conversation, Conversations

__all__ = [
    "Booking",
    "Candidate",
    "CandidateStatus",
    "Conversation",
    "Conversations",
    "EngineLoad",
    "Fleet",
    "HealthRules",
    "HealthState",
    "Lease",
    "ProbeFailure",
    "Replica",
    "ServedModel",
]
