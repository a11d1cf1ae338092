"""One request that waits, where it would go, and how long it would take there."""

from __future__ import annotations

from math import log2
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from policies.view import CandidateCost, CandidateId, ReplicaView
from router.config import QueueConfig

_DEFAULTS: Final = QueueConfig()

_STEPS: Final = 8  # of groups in a factor of 2

MAX_PRIORITY: Final = 1000
"""Of a tenant; the lowest is as far below 0."""

_BATCH_LEVEL: Final = 2 * MAX_PRIORITY + 1
BATCH_RANK: Final = 2 * _BATCH_LEVEL


class Group(NamedTuple):
    """Those that want to go to one candidate and take about as long, in the order of groups there.

    `rank` is twice the level, and 1 more of a tenant that has had its share; `step`: see `step_of`.
    """

    candidate: CandidateId | None  # None: not placed yet
    in_time: bool  # none has waited for so long that it goes before all
    rank: int
    step: int
    lives_there: bool

    @property
    def order(self) -> tuple[bool, int, int]:
        """Return what decides who goes first in a line."""
        return self.in_time, self.rank, self.step

    @property
    def alike(self) -> tuple[int, bool]:
        """Return level, and whether they live there."""
        return self.rank // 2, self.lives_there

    @property
    def is_behind(self) -> bool:
        """Return whether all of class interactive go first, wherever they wait."""
        return self.in_time and self.rank >= BATCH_RANK


def level_of(*, is_batch: bool, priority: int) -> int:
    """Return the part of an order that is strict: batch behind interactive, then by priority."""
    return is_batch * _BATCH_LEVEL + MAX_PRIORITY - priority


class QueueRules(Struct, frozen=True, kw_only=True):
    """When a request may go; see `router.scheduling.queue`."""

    window: int = _DEFAULTS.window  # requests that may wait at a candidate behind its first
    ready_ms: float = _DEFAULTS.ready_ms  # of work at a candidate, up to which more may wait there
    fill: float = _DEFAULTS.fill  # of a cache, for the conversations that live there
    patience: float = _DEFAULTS.patience  # of its price in idle time, where it does not fit
    max_wait_s: float = _DEFAULTS.max_wait_s
    batch_max_wait_s: float = _DEFAULTS.batch_max_wait_s
    quantum_s: float = _DEFAULTS.quantum_s  # compute of one round, of a tenant with weight 1
    tbt_ms: float | None = _DEFAULTS.tbt_ms  # that an answer's tokens may be apart; None: any time


class Choice(Protocol):
    """Where a policy would send a request now."""

    @property
    def view(self) -> ReplicaView: ...

    @property
    def num_pooled_tokens(self) -> int | None:
        """Count the leading tokens that a pool has and the candidate reads; None: no pool."""
        ...

    def costs(self) -> tuple[CandidateCost, ...]:
        """Return what each candidate would cost, the waits in the router left out."""
        ...


class Candidates(Protocol):
    """What is known of candidates."""

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        """Return how many tokens its cache holds; None: not known, and everything fits."""
        ...

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        """Count requests before their first token that routers sent there, but for lost ones."""
        ...

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        """Return how long what waits there takes at the pace of the last ones; 0.0: not known."""
        ...

    def has_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> bool:
        """Return whether so much idle time of its engine is saved up."""
        ...

    def spend_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> None:
        """Take so much of that."""
        ...

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        """Predict the time between tokens of an answer when its prompt has been computed.

        None: the candidate has nothing in flight, or too little is known of it.
        """
        ...

    def ends_per_s(self, candidate: CandidateId) -> float:
        """Return how many answers end in a second at all that answer what a candidate does."""
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
    priority: int = 0  # likewise: a higher one goes first
    is_spent: bool = False  # its tenant has had its share
    deadline_s: float | None = None  # when its first token has to be there; None: whenever
    number: int = 0  # in the order of arrival; set by the queue, as is `is_spent`
    compute_ms: float = 1.0  # as last chosen
    answers_at: CandidateId | None = None  # as last chosen, if its prompt is computed elsewhere
    group: Group = Group(None, True, 0, 0, True)
    held_by: str | None = None  # what it waits for, as last judged: `Verdict.why`
    expected_ms: float | None = None  # its wait, as predicted when it came
    rules: QueueRules | None = None  # of its arm of an experiment, but for its place in the order

    @property
    def rank(self) -> int:
        """Return the part of its order that its class and its tenant decide."""
        level = self.is_batch * _BATCH_LEVEL + MAX_PRIORITY - self.priority  # written out: hot
        return 2 * level + self.is_spent

    @property
    def level(self) -> int:
        """Return `level_of` it."""
        return level_of(is_batch=self.is_batch, priority=self.priority)


def step_of(takes_ms: float) -> int:
    """Return the step of what a prompt takes: those of one are alike to a tenth."""
    return int(_STEPS * log2(takes_ms))


def middle_ms(step: int) -> float:
    """Return what a prompt of a step takes, about."""
    return float(2.0 ** ((step + 0.5) / _STEPS))


def compute_ms(choice: Choice, num_tokens: int) -> float:
    """Predict how long a prompt keeps an engine; at least 1 ms.

    What is read from a pool does not: others are computed meanwhile.
    """
    view = choice.view
    num_held = max(view.num_gpu_tokens, view.num_cpu_tokens, choice.num_pooled_tokens or 0)
    cost = view.cost
    return max(1.0, cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms)


def read_ms(choice: Choice) -> float:
    """Predict how long an engine reads what it lacks of a prompt, from CPU memory or a pool."""
    view, num_pooled = choice.view, choice.num_pooled_tokens or 0
    num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
    num_read = max(num_own, num_pooled) - view.num_gpu_tokens
    return view.cost.fetch_ms(
        num_read, from_pool=num_pooled > num_own, num_on_disk=view.num_disk_tokens
    )


def read_ratio(choice: Choice, num_tokens: int, *, from_pool: bool) -> float:
    """Predict how long so many tokens are read, over how long they are computed; at most 1.

    From the pool (1 without one), or from the engine's own CPU memory.
    """
    if from_pool and choice.num_pooled_tokens is None:
        return 1.0
    cost = choice.view.cost
    computed_ms = cost.prefill_ms(num_tokens, 0) - cost.base_ms
    reading_ms = cost.fetch_ms(num_tokens, from_pool=from_pool)
    return reading_ms / computed_ms if reading_ms < computed_ms else 1.0
