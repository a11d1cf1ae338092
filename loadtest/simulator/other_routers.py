"""How routers learn of one another's requests, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from loadtest.simulator.events import Events, Kind
from loadtest.simulator.router import Router
from loadtest.simulator.ticket import Elsewhere, Ticket


class OtherRouters:
    """Routers that learn of one another's requests `lag_s` later; math.inf: never."""

    __slots__ = ("_events", "_lag_s", "_routers")

    def __init__(self, routers: Sequence[Router], lag_s: float, events: Events) -> None:
        self._routers = routers
        self._lag_s = lag_s
        self._events = events

    def began(self, ticket: Ticket, now_s: float) -> None:
        """Send all routers but the ticket's own a note that it was sent."""
        if len(self._routers) == 1 or math.isinf(self._lag_s):
            return
        note = ticket.router.note_of(ticket.placed, ticket.placement)
        ticket.elsewhere = [
            Elsewhere(router) for router in self._routers if router is not ticket.router
        ]

        def learn(other: Elsewhere, received_s: float) -> None:
            other.lease, other.claim = other.router.began_elsewhere(note, received_s)

        self._notify(ticket, now_s, learn)

    def answered(self, ticket: Ticket, ttft_s: float, now_s: float) -> None:
        """Send the routers that know of it a note of its first token."""
        self._notify(ticket, now_s, partial(_answered, ttft_s))

    def ended(self, ticket: Ticket, now_s: float) -> None:
        """Send them a note that it is over."""
        self._notify(ticket, now_s, _ended)

    def _notify(
        self, ticket: Ticket, now_s: float, learn: Callable[[Elsewhere, float], None]
    ) -> None:
        for other in ticket.elsewhere:
            self._events.plan(now_s + self._lag_s, Kind.NOTE, partial(learn, other))


def _answered(ttft_s: float, other: Elsewhere, now_s: float) -> None:
    if other.lease is not None:
        other.router.answered_elsewhere(other.lease, ttft_s, now_s)


def _ended(other: Elsewhere, now_s: float) -> None:
    if other.lease is not None:
        other.router.ended_elsewhere(other.lease, other.claim, now_s)
