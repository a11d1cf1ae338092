"""One request that waits, where it would go, and how long it would take there."""

from __future__ import annotations

from math import log2
from typing import Any, Final, Protocol

from msgspec import Struct

from policies.view import CandidateCost, CandidateId, ReplicaView

_STEPS: Final = 2  # of groups in a factor of 2

BATCH_RANK: Final = 2

Group = tuple[CandidateId | None, int, bool, int]
"""Those that want to go to one candidate, have one rank, live there or not, and take about as
long. The rank: 0, and 1 of a tenant that has had its share; of class batch 2 and 3."""


class Choice(Protocol):
    """Where a policy would send a request now."""

    @property
    def view(self) -> ReplicaView: ...

    def costs(self) -> tuple[CandidateCost, ...]:
        """Return what each candidate would cost, the waits in the router left out."""
        ...


class Waiting(Struct):
    """One request that waits; `item` is the caller's."""

    item: Any
    session: int | None
    num_tokens: int
    since_s: float
    is_batch: bool = False
    tenant: str = ""
    weight: float = 1.0  # of its tenant
    is_spent: bool = False  # its tenant has had its share
    deadline_s: float | None = None  # when its first token has to be there; None: whenever
    number: int = 0  # in the order of arrival
    compute_ms: float = 1.0  # as last chosen
    candidate: CandidateId | None = None  # likewise
    group: Group = (None, 0, True, 0)
    expected_ms: float | None = None  # its wait, as predicted when it came

    @property
    def rank(self) -> int:
        """Return the part of its order that its class and its tenant decide."""
        return BATCH_RANK * self.is_batch + self.is_spent


def step_of(compute_ms: float) -> int:
    """Return the step of what a prompt takes: those of one are alike to a factor of 1.4."""
    return int(_STEPS * log2(compute_ms))


def middle_ms(step: int) -> float:
    """Return what a prompt of a step takes, about."""
    return float(2.0 ** ((step + 0.5) / _STEPS))


def compute_ms(view: ReplicaView, num_tokens: int) -> float:
    """Predict how long a prompt keeps an engine; at least 1 ms."""
    num_held = max(view.num_gpu_tokens, view.num_cpu_tokens)
    cost = view.cost
    return max(1.0, cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms)
