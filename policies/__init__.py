"""Routing policies: pure functions from a `Snapshot` to a `Decision`.

What must live here: the vocabulary (`view`), the policies, their registry. What must not: a
clock, randomness that is not derived from the snapshot, I/O, anything of router or loadtest.
The same objects decide live, in the simulator and in `warmroute redecide`.
"""

from policies.policy import Policy
from policies.registry import POLICIES, create
from policies.view import (
    CandidateCost,
    CandidateId,
    CostModel,
    Decision,
    Holding,
    ReplicaView,
    RequestView,
    Snapshot,
)

__all__ = [
    "POLICIES",
    "CandidateCost",
    "CandidateId",
    "CostModel",
    "Decision",
    "Holding",
    "Policy",
    "ReplicaView",
    "RequestView",
    "Snapshot",
    "create",
]
