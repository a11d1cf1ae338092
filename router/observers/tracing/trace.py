"""What is followed of a request: times and ids, as they come; its record, at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from multidict import MutableMultiMapping

from router.api.usage import Usage
from router.config import TracingConfig
from router.observers.tracing.context import (
    PARENT,
    STATE,
    bound_of,
    is_below,
    new_span_id,
    new_trace_id,
    parsed,
    written,
)
from router.records.record import DecisionRecord

_MOST_TRIES: Final = 32  # of one request; retries are fewer


class Attempt:
    """A request to a replica: a CLIENT span. Times are monotonic.

    decided_s: When it was decided where it goes.
    role: both | prefill | decode.
    ended_s, outcome: None: it runs.
    """

    __slots__ = (
        "begun_s",
        "candidate",
        "decided_s",
        "ended_s",
        "outcome",
        "role",
        "span_id",
        "url",
    )

    def __init__(self, candidate: str, url: str, role: str, decided_s: float) -> None:
        self.span_id = new_span_id()
        self.candidate = candidate
        self.url = url
        self.role = role
        self.decided_s = decided_s
        self.begun_s = time.monotonic()
        self.ended_s: float | None = None
        self.outcome: str | None = None

    def end(self, outcome: str) -> None:
        """Record that it has ended, and how; the first time counts."""
        if self.ended_s is None:
            self.ended_s, self.outcome = time.monotonic(), outcome


class Trace:
    """A request that is followed: a SERVER span, unless it is not sampled.

    parent_id: The client's span. None: the trace begins here.
    begun_ns: When it came, unix time.
    route: That it is for; None: none.
    error: Code of the router's own error, if it ended with one.
    record: Of the decision, set after the answer. None: it was never placed, or not yet recorded.
    usage: As the engine reports it. None: it does not.
    """

    __slots__ = (
        "attempts", "begun_ns", "begun_s", "ended_s", "error", "is_sampled", "method",
        "parent_id", "record", "route", "span_id", "status", "streams", "trace_id", "usage",
    )  # fmt: skip

    def __init__(
        self, trace_id: int, parent_id: int | None, *, is_sampled: bool, method: str
    ) -> None:
        self.trace_id = trace_id
        self.span_id = new_span_id()
        self.parent_id = parent_id
        self.is_sampled = is_sampled
        self.method = method
        self.begun_s, self.begun_ns = time.monotonic(), time.time_ns()
        self.route: str | None = None
        self.attempts: list[Attempt] = []
        self.error: str | None = None
        self.record: DecisionRecord | None = None
        self.usage: Usage | None = None
        self.streams = False
        self.status: int | None = None
        self.ended_s = self.begun_s

    def sent(
        self,
        headers: MutableMultiMapping[str],
        candidate: str,
        url: str,
        role: str,
        decided_s: float,
    ) -> Attempt | None:
        """Begin a try, and write its context into an engine's headers. None: it is not sampled."""
        attempt, span_id = None, self.span_id
        if self.is_sampled and len(self.attempts) < _MOST_TRIES:
            attempt = Attempt(candidate, url, role, decided_s)
            span_id = attempt.span_id
            self.attempts.append(attempt)
        headers[PARENT] = written(self.trace_id, span_id, is_sampled=self.is_sampled)
        if self.parent_id is None:
            headers.popall(STATE, None)  # of the client's trace, which ends here
        return attempt

    def at_ns(self, at_s: float) -> int:
        """Return the unix time of a monotonic one."""
        return self.begun_ns + round((at_s - self.begun_s) * 1e9)


class Tracer:
    """Decides which requests are followed.

    Args:
        put: Takes a sampled request that has ended.
    """

    def __init__(self, config: TracingConfig, put: Callable[[Trace], None]) -> None:
        self._joins = config.join_clients
        self._bound = bound_of(config.sample_ratio)
        self._put = put

    def begin(self, headers: Mapping[str, str], method: str) -> Trace | None:
        """Begin to follow a request. None: its client says that it is not sampled.

        What is not sampled here goes to engines as such. An engine that is told nothing would
        begin a trace of its own.
        """
        parent = parsed(headers.get(PARENT)) if self._joins else None
        if parent is not None:
            if not parent.is_sampled:
                return None  # its headers pass through
            return Trace(parent.trace_id, parent.span_id, is_sampled=True, method=method)
        trace_id = new_trace_id()
        is_sampled = is_below(trace_id, self._bound)
        return Trace(trace_id, None, is_sampled=is_sampled, method=method)

    def end(self, trace: Trace, status: int | None) -> None:
        """End a request; `status` None: nobody was there to be answered."""
        if trace.is_sampled:
            trace.status, trace.ended_s = status, time.monotonic()
            self._put(trace)
