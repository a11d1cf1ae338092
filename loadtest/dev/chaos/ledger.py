"""The outcome of every request, as its client saw it.

    right          the complete answer of an undisturbed engine
    refused        a wrong request, answered with a client error of the API's shape; or the only
                   one that was at two deaths: the router cannot know that replicas were killed
    error          an error answer of the API's shape, nothing else
    error event    a stream that ended with an error event
    aborted        an answer that its engine gave up: its beginning is right, its end says so
    left           the client left on purpose
    router gone    its router was killed or died, or the connection was refused
    wrong          another answer than the right one
    unclear        anything else: cut, hung, or in no known shape

A run with an outcome of `wrong` or `unclear` does not hold.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Outcome = Literal[
    "right",
    "refused",
    "error",
    "error event",
    "aborted",
    "left",
    "router gone",
    "wrong",
    "unclear",
]

FAILED: frozenset[Outcome] = frozenset({"error", "error event", "aborted", "wrong", "unclear"})


class Seen(Struct, kw_only=True):
    """One request of a client, at one router. Seconds of the loop's clock."""

    id: str
    kind: str  # "agent", or which hostile request
    api: str
    router: str
    life: int  # of the router, when it was sent
    start_s: float
    end_s: float = 0.0
    status: int | None = None
    outcome: Outcome = "unclear"
    detail: str = ""
    replica: str | None = None  # that answered, by the router's header
    has_text: bool = False  # some of an answer was handed to the client


class Ledger:
    """All requests of a run."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def close(self, seen: Seen) -> None:
        """Enter a request that has ended."""
        self.seen.append(seen)

    def count(self, outcome: Outcome) -> int:
        return sum(seen.outcome == outcome for seen in self.seen)
