"""The fleet: all replicas with their load, health and speed, in one place.

    members   who is there, and the health of each
    offers    which candidates can take a request, and why there is none
    load      work in flight, and what is learned from it

The life of a request: `offers.candidates` -> `load.views` -> (policy) -> `load.admit` ->
`load.first_token` -> `load.end`. What must not live here: which candidate to take (policies), what
is cached (router.index), any I/O or clock. Every state change is one synchronous call; `now_s`
comes from the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policies.view import CandidateId, CostModel
from router.index.behind import NOTHING_BEHIND, Behind
from router.index.hit_length import KvLayout
from router.replicas.cost_fit import PRIOR
from router.replicas.health import HealthRules
from router.replicas.load import Load
from router.replicas.members import Members
from router.replicas.offers import Offers
from router.scheduling.conversations import Conversations


def _ignore(*_: object) -> None:
    """Do nothing about what is called."""


def _nothing_behind(_: CandidateId) -> Behind:
    """Return that there is nothing behind a candidate's cache."""
    return NOTHING_BEHIND


class Fleet:
    """The three parts, put together; see the module.

    Args:
        rules: When a replica's health changes.
        prior: The cost of a prompt before any was seen.
        order: Names; the replicas of these come first, in this order.
        conversations: Those that requests belong to.
        waiting: Replicas and sources that have not answered yet, and why; grows and shrinks.
        layout_of: Returns a candidate's KV groups; None: it has one, or they are not known.
        behind: Returns the blocks behind a candidate's cache.
        on_down: Called with a replica that is dead or hangs, unless it was draining, and now.
    """

    __slots__ = ("conversations", "load", "members", "offers")

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        order: Sequence[str] = (),
        conversations: Conversations | None = None,
        waiting: Mapping[str, str] | None = None,
        layout_of: Callable[[CandidateId], KvLayout | None] = _ignore,
        behind: Callable[[CandidateId], Behind] = _nothing_behind,
        on_down: Callable[[str, float], None] = _ignore,
    ) -> None:
        self.conversations = Conversations() if conversations is None else conversations
        self.members = Members(
            rules=rules or HealthRules(),
            prior=prior,
            order=order,
            conversations=self.conversations,
            on_down=on_down,
        )
        self.offers = Offers(self.members, {} if waiting is None else waiting)
        self.load = Load(self.members, self.conversations, layout_of, behind)
