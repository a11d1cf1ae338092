"""Who may be offered to a policy, of those that serve the model and do not drain.

1. Fit for requests: up, or on trial with nobody trying.
2. In a panic, when fewer than `panic_ratio` are fit, all that listen: most breakers open at once
   are more likely wrong than right, and the few left would drown.
3. A recovered candidate (slow start) while it has less than its share of the mean load; its
   cache is cold and its engine may still warm up. At least one request, and never nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.replicas.candidate_state import Slot
from router.replicas.health import HealthRules


def eligible(slots: Sequence[Slot], rules: HealthRules, now_s: float) -> list[Slot]:
    """Choose the slots to offer, in the order given; empty if none is fit."""
    fit = [slot for slot in slots if slot.health.can_accept(now_s)]
    if len(fit) < rules.panic_ratio * len(slots):
        fit = [slot for slot in slots if slot.health.can_accept_in_panic(now_s)]
    if not fit:
        return []
    mean_requests = sum([slot.ledger.num_requests for slot in fit]) / len(fit)
    return [slot for slot in fit if _has_room(slot, mean_requests, now_s)] or fit


def _has_room(slot: Slot, mean_requests: float, now_s: float) -> bool:
    weight = slot.health.weight(now_s)
    return weight >= 1.0 or slot.ledger.num_requests < max(1.0, weight * mean_requests)
