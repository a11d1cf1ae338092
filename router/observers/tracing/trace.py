"""What is followed of a request: its spans, and times as they come."""

from __future__ import annotations

import time
from typing import Any, Final

from router.api.usage import Usage
from router.records.record import DecisionRecord

STATE: Final = "tracestate"
MOST_TRIES: Final = 32  # of one request; retries are fewer

Span = Any
"""A span of OpenTelemetry's SDK; only `otlp` imports it."""


class Attempt:
    """A request to a replica: a CLIENT span. Times are monotonic.

    decided_s: When it was decided where it goes.
    role: both | prefill | decode.
    ended_s, outcome: None: it runs.
    """

    __slots__ = ("begun_s", "candidate", "decided_s", "ended_s", "outcome", "role", "span", "url")

    def __init__(
        self, span: Span, candidate: str, url: str, role: str, decided_s: float, begun_s: float
    ) -> None:
        self.span = span
        self.candidate = candidate
        self.url = url
        self.role = role
        self.decided_s = decided_s
        self.begun_s = begun_s
        self.ended_s: float | None = None
        self.outcome: str | None = None

    def end(self, outcome: str) -> None:
        """Record that it has ended, and how; the first time counts."""
        if self.ended_s is None:
            self.ended_s, self.outcome = time.monotonic(), outcome


class Trace:
    """A request that is followed: a SERVER span, which records nothing if it is not sampled.

    is_joined: It is part of its client's trace.
    route: That it is for; None: none.
    error: Code of the router's own error, if it ended with one.
    record: Of the decision, set once it is complete. None: it was never placed, or not yet.
    usage: As the engine reports it. None: it does not.
    is_awaited: Its record is to come.
    status: None: nobody was there to be answered. ended_s: None: it runs.
    """

    __slots__ = (
        "attempts", "begun_ns", "begun_s", "ended_s", "error", "is_awaited", "is_joined", "method",
        "record", "route", "span", "status", "streams", "usage",
    )  # fmt: skip

    def __init__(self, span: Span, method: str, begun_ns: int, *, is_joined: bool) -> None:
        self.span = span
        self.method = method
        self.begun_s, self.begun_ns = time.monotonic(), begun_ns
        self.is_joined = is_joined
        self.route: str | None = None
        self.attempts: list[Attempt] = []
        self.error: str | None = None
        self.record: DecisionRecord | None = None
        self.usage: Usage | None = None
        self.streams = False
        self.status: int | None = None
        self.ended_s: float | None = None
        self.is_awaited = False

    def at_ns(self, at_s: float) -> int:
        """Return the unix time of a monotonic one."""
        return self.begun_ns + round((at_s - self.begun_s) * 1e9)
