"""One turn on its way through the fleet."""

from __future__ import annotations

from msgspec import Struct, field

from loadtest.simulator.engine import Request
from loadtest.simulator.router import Placement, Router
from loadtest.workload import Turn
from router.index.claims import Claim
from router.replicas.ledger import Lease


class Elsewhere(Struct):
    """One request as another router has booked it; None: it does not know of it yet."""

    router: Router
    lease: Lease | None = None
    claim: Claim | None = None


class Ticket(Struct):
    """One turn on its way, or its prompt alone.

    `answer`: of a prompt that is computed for a decode replica, the turn that waits for it there.
    `prompt`: of a turn whose prompt is computed elsewhere, how that went.
    """

    turn: Turn
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
