"""One request in the queue, and the figures that decide its turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from policies.view import CandidateCost, CandidateId, ReplicaView
from router.base.caller import ANYBODY, Caller
from router.config import QueueConfig

_DEFAULTS: Final = QueueConfig()

MAX_PRIORITY: Final = 1000
"""Highest priority of a caller; the lowest is its negative."""

BATCH_WAIT_RATIO: Final = 2.0
"""Maximum wait of a batch request, as a multiple of `QueueRules.max_wait_s`."""

LATE: Final = 0.95
"""A request is late after this share of the maximum wait: the rest is for the window."""

READY_MS: Final = 300.0
"""Work ready inside a replica that is enough. One prompt alone costs up to 60 % of throughput if
prompts are short (docs/research/queue-window.md)."""

_BATCH_LEVEL: Final = 2 * MAX_PRIORITY + 1


InFront = Mapping[CandidateId, float]
"""Compute in ms that waits in a router for a candidate, and goes there before a request."""

NOTHING: Final[InFront] = {}


class QueueRules(Struct, frozen=True, kw_only=True):
    """When a request may go; see `router.scheduling.queue`.

    window: Requests that wait inside a replica behind the one that it computes.
    ready_ms: Work inside a replica up to which more of them wait there.
    """

    fill: float = _DEFAULTS.fill  # share of a cache for the conversations that live there
    max_wait_s: float = _DEFAULTS.max_wait_s
    tbt_ms: float | None = _DEFAULTS.tbt_ms  # limit on inter-token latency; None: no limit
    window: int = 1
    ready_ms: float = READY_MS

    def longest_wait_s(self, *, is_batch: bool) -> float:
        """Return the maximum wait of a class."""
        return self.max_wait_s * (BATCH_WAIT_RATIO if is_batch else 1.0)


DEFAULT_RULES: Final = QueueRules()


class Choice(Protocol):
    """The replica that a policy would send a request to now."""

    @property
    def view(self) -> ReplicaView: ...

    def costs(self) -> tuple[CandidateCost, ...]:
        """Return the cost of each candidate, without waits in the router."""
        ...


class Candidates(Protocol):
    """State of the replicas that the queue asks for."""

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        """Return the tokens that a cache holds, without what is behind it; None: not known."""
        ...

    def reads_back(self, candidate: CandidateId) -> bool:
        """Return whether a replica reads what its cache evicts; a pool's view says it, too."""
        ...

    def room_tokens(self, candidate: CandidateId) -> int | None:
        """Return the tokens of conversations that its cache, or what is behind it, can keep.

        None: everything fits, or its cache is not known.
        """
        ...

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        """Count the requests before their first token that routers sent, without lost ones."""
        ...

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        """Return how long the work in a replica takes at its recent pace; 0.0: not known."""
        ...

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        """Predict the inter-token latency of an answer; None: nothing in flight, or not known."""
        ...


class Where(NamedTuple):
    """Where a policy may send a request."""

    home: CandidateId | None = None  # only there, if it can take requests
    full: frozenset[CandidateId] = frozenset()  # not there, if there is another


ANYWHERE: Final = Where()

VISITS: Final = frozenset({"waited_out", "idle", "seldom"})
"""Why a request was sent though its conversation has no room (`Verdict.why`)."""


class LinePosition(NamedTuple):
    """Position in a line: the smallest goes first."""

    is_in_time: bool  # False: waited for the maximum, and goes before all others
    level: int  # see `level_of`
    is_spent: bool  # its caller has used its share
    key_s: float  # see `router.scheduling.order`
    number: int  # order of arrival


class Waiting(Struct):
    """One request in the queue; `item` is for those who use the queue."""

    item: Any
    session: int | None
    num_tokens: int
    since_s: float
    is_batch: bool = False
    caller: Caller = ANYBODY
    deadline_s: float | None = None  # time by which its first token must come; None: any
    fill: float | None = None  # of its own, in place of `QueueRules.fill`
    answers_at: CandidateId | None = None  # as last chosen, if another replica computes the prompt
    group: str | None = None  # requests that can go to the same replicas: their model
    parent: int | None = None  # the conversation that started this one
    has_room: bool = False  # its conversation has, where it is; set by the queue
    is_seldom: bool = False  # its conversation comes for single turns; set by the queue
    ticket_s: float = 0.0  # when its conversation first came; set by the queue
    place: LinePosition = LinePosition(True, 0, False, 0.0, 0)  # set by the queue
    compute_ms: float = 0.0  # predicted time to compute the prompt, as last chosen
    held_by: str | None = None  # what it waits for, as last judged: `Verdict.why`

    @property
    def level(self) -> int:
        """Return the strict part of its order."""
        return level_of(is_batch=self.is_batch, priority=self.caller.priority)


def level_of(*, is_batch: bool, priority: int) -> int:
    """Return the strict part of an order: batch behind interactive, then by priority."""
    return is_batch * _BATCH_LEVEL + MAX_PRIORITY - priority
