"""Which candidates are offered to a policy, of those that serve the model and do not drain.

1. Candidates that are fit: up, or on trial without a request.
2. In a panic, if fewer than `panic_ratio` are fit: all that listen. Many open breakers are more
   likely wrong than right, and the few fit candidates would be overloaded.
3. If that leaves none: those that have stalled. They may go on.
4. A recovered candidate (slow start), while it has less than its share of the mean load. Its cache
   is cold and its engine may still warm up. It may always have one request.
5. A candidate whose weight is less than 1, in the same way, always: capacity that may be taken
   away.

If the last two rules leave none, all candidates of the first three are offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from router.replicas.candidate_state import CandidateState
from router.replicas.health import HealthRules


def eligible(
    states: Sequence[CandidateState],
    rules: HealthRules,
    now_s: float,
    restricted: AbstractSet[str],
) -> list[CandidateState]:
    """Choose the candidates to offer, in the order given; empty if none is fit.

    `restricted`: the replicas that health or weight may restrict; only these are examined.
    """
    fit = [
        state
        for state in states
        if state.candidate.replica.name not in restricted or state.health.can_accept(now_s)
    ]
    if len(fit) < rules.panic_ratio * len(states):
        fit = [state for state in states if state.health.can_accept_in_panic(now_s)]
    fit = fit or [state for state in states if state.health.can_accept_at_last()]
    if not fit:
        return []
    mean_requests = sum([state.ledger.num_requests for state in fit]) / len(fit)
    return [
        state
        for state in fit
        if state.candidate.replica.name not in restricted or _has_room(state, mean_requests, now_s)
    ] or fit


def _has_room(state: CandidateState, mean_requests: float, now_s: float) -> bool:
    weight = state.health.weight(now_s) * state.candidate.replica.weight
    return weight >= 1.0 or state.ledger.num_requests < max(1.0, weight * mean_requests)
