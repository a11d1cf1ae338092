"""One turn in the fleet."""

from __future__ import annotations

from msgspec import Struct, field

from loadtest.simulator.engine import Request
from loadtest.simulator.router import Router
from loadtest.workload import Turn
from router.index.candidate_stream import Claim
from router.replicas.ledger import Lease
from router.request.results import Placement, Prompt


class Elsewhere(Struct):
    """One request as another router has booked it; None: it does not know it yet."""

    router: Router
    lease: Lease | None = None
    claim: Claim | None = None


class Ticket(Struct):
    """One turn in the fleet, or its prompt alone.

    `placed`: The turn as the router places it.
    `answer`: The turn that waits for this prompt at a decode replica.
    `prompt`: The request that computed this turn's prompt at a prefill replica.
    """

    turn: Turn
    placed: Prompt
    arrival_s: float
    num_out: int
    placement: Placement
    router: Router
    elsewhere: list[Elsewhere] = field(default_factory=list)
    answer: Ticket | None = None
    prompt: Request | None = None


def ticket_of(request: Request) -> Ticket:
    """Return the ticket that an engine computes."""
    assert isinstance(request.owner, Ticket)
    return request.owner
