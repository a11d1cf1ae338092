"""What the spans of a request that has ended say, from what was noted and its decision record.

Source of names: open-telemetry/semantic-conventions-genai at 024a4f9, docs/gen-ai/
client-inference.md (status: Development), and semantic-conventions 1.44.0, docs/http/http-spans.md
(stable). What these have no name for begins with `warmroute.`; times there are in seconds.
`warmroute.session` is a digest: `gen_ai.conversation.id` must be the client's own id, which is
written nowhere.

Usage stands at the CLIENT span alone. Otherwise backends that add up usage would count it twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from router.api.answers import Usage
from router.records.record import Computed, DecisionRecord, Outcome

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
    error_status: The SDK's status of a span that failed.
    error: Code of the router's own error, if it ended with one.
    record: Of the decision, set once it is complete. None: it was never placed, or not yet.
    usage: As the engine reports it. None: it does not.
    is_awaited: Its record is to come.
    status: None: the client had left. ended_s: None: it runs.
    """

    __slots__ = (
        "attempts", "begun_ns", "begun_s", "ended_s", "error", "error_status", "is_awaited",
        "is_joined", "method", "record", "route", "span", "status", "streams", "usage",
    )  # fmt: skip

    def __init__(
        self, span: Span, method: str, begun_ns: int, *, is_joined: bool, error_status: Any
    ) -> None:
        self.span = span
        self.method = method
        self.begun_s, self.begun_ns = time.monotonic(), begun_ns
        self.is_joined = is_joined
        self.error_status = error_status
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


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_HTTP: Final = "HTTP"  # another method, as the conventions say
_REPLACED: Final = "replaced"
_NO_FAILURE: Final = frozenset(
    {Outcome.OK.value, Outcome.CLIENT_ERROR.value, Outcome.CLIENT_GONE.value, _REPLACED}
)
_OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}
"""The operation of each API (`Api.name`); others have no name."""

_PORTS: Final = {"http": 80, "https": 443}


def finish(trace: Trace) -> None:
    """Describe and end the spans of a request that has ended: one for each try, then its own."""
    if not trace.span.is_recording():
        return
    record, span, name = trace.record, trace.span, _method(trace)
    assert trace.ended_s is not None
    for number, attempt in enumerate(trace.attempts, start=1):
        _describe_try(trace, attempt, number)
    attributes: dict[str, Any] = {
        "http.request.method": name if name != _HTTP else "_OTHER",
        "http.route": trace.route,
        "http.response.status_code": trace.status,
    }
    error = trace.error if trace.status is None or trace.status >= 500 else None
    if record is not None:
        attributes |= _of_record(record)
        if record.outcome not in _NO_FAILURE:
            error = error or _failure(record)
    if error is None and trace.status is not None and trace.status >= 500:
        error = str(trace.status)
    attributes["error.type"] = error or trace.error
    for event, at_s, more in sorted(_events(trace, trace.ended_s), key=lambda each: each[1]):
        span.add_event(event, _known(more), trace.at_ns(at_s))
    span.update_name(f"{name} {trace.route}" if trace.route is not None else name)
    _end(trace, span, attributes, error, trace.ended_s)


def _end(
    trace: Trace, span: Span, attributes: dict[str, Any], error: str | None, at_s: float
) -> None:
    span.set_attributes(_known(attributes))
    if error is not None:
        span.set_status(trace.error_status, error)
    span.end(trace.at_ns(at_s))


def _of_record(record: DecisionRecord) -> dict[str, Any]:
    assignment = record.assignment
    attributes: dict[str, Any] = {
        "warmroute.request_id": record.request_id,
        "gen_ai.request.model": record.model or None,
        "warmroute.tenant": record.tenant,
        "warmroute.session": record.session,
        "warmroute.outcome": record.outcome,
        "warmroute.replica": record.decision.candidate,
        "warmroute.policy": record.policy,
        "warmroute.reason": record.decision.reason,
        "warmroute.cache_state": record.state,
        "warmroute.variant": assignment.label if assignment is not None else None,
        "warmroute.router_s": record.router_ms / 1000,
        "warmroute.waited_s": record.waited_ms / 1000,
        "warmroute.waited_for": record.waited_for,
        "warmroute.predicted_ttft_s": _seconds(record.predicted_ttft_ms),
        "warmroute.ttft_s": _seconds(record.ttft_ms),
        "warmroute.prompt_tokens": record.num_prompt_tokens,
        "warmroute.predicted_cached_tokens": record.num_predicted_cached_tokens,
        "warmroute.cached_tokens": record.num_reported_cached_tokens,
    }
    if record.computed is not None:
        attributes |= _of_causes(record.computed)
    return attributes


def _of_causes(computed: Computed) -> dict[str, Any]:
    change, move, loss = computed.change, computed.move, computed.loss
    return {
        **{f"warmroute.computed.{cause}": num for cause, num in computed.tokens.items()},
        "warmroute.changed.part": change.part if change is not None else None,
        "warmroute.changed.offset": change.offset if change is not None else None,
        "warmroute.moved_from": move.origin if move is not None else None,
        "warmroute.lost_at": loss.replica if loss is not None else None,
    }


def _events(trace: Trace, ended_s: float) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield what happened: it waited, it was decided where each try goes, its first token came."""
    record, last = trace.record, trace.attempts[-1] if trace.attempts else None
    if record is None:
        return
    router_s, waited_s = record.router_ms / 1000, record.waited_ms / 1000
    if record.waited_for is not None:
        decided_s = trace.attempts[0].decided_s if trace.attempts else ended_s
        queued_s = max(trace.begun_s, decided_s - waited_s)
        yield "warmroute.queued", queued_s, {"warmroute.waited_for": record.waited_for}
    for attempt in trace.attempts:
        more = {"warmroute.replica": attempt.candidate}
        if attempt is last:
            more |= {"warmroute.policy": record.policy, "warmroute.reason": record.decision.reason}
        yield "warmroute.decided", attempt.decided_s, more
    if record.ttft_ms is not None:
        yield (
            "warmroute.first_token",
            trace.begun_s + router_s + waited_s + record.ttft_ms / 1000,
            {},
        )


def _describe_try(trace: Trace, attempt: Attempt, number: int) -> None:
    """Describe and end a try's span. Usage belongs to the one that answered."""
    record = trace.record
    failures = {} if record is None else {each.candidate: each.failure for each in record.tries}
    outcome = attempt.outcome or Outcome.CLIENT_GONE.value
    error = failures.get(attempt.candidate) if attempt.role != "prefill" else None
    if error is None and outcome not in _NO_FAILURE:
        error = outcome
    url = urlsplit(attempt.url)
    attributes: dict[str, Any] = {
        "gen_ai.provider.name": "vllm",
        "server.address": url.hostname,
        "server.port": url.port or _PORTS.get(url.scheme),
        "warmroute.replica": attempt.candidate,
        "warmroute.role": attempt.role,
        "warmroute.try": number,
        "warmroute.outcome": outcome,
        "error.type": error,
    }
    if record is not None:
        attributes["gen_ai.operation.name"] = _OPERATIONS.get(record.api)
        attributes["gen_ai.request.model"] = record.model or None
        attributes["gen_ai.request.stream"] = True if trace.streams else None
        if attempt is _answered(trace, record):
            attributes |= _of_answer(trace, record, attempt)
    attempt.span.update_name(_name(trace, record))
    _end(trace, attempt.span, attributes, error, attempt.ended_s or trace.ended_s or 0.0)


def _answered(trace: Trace, record: DecisionRecord) -> Attempt | None:
    """Return the try whose answer the client has. None: there is none."""
    last = record.tries[-1] if record.tries else None
    if last is None or last.failure is not None:
        return None
    return next((a for a in reversed(trace.attempts) if a.candidate == last.candidate), None)


def _of_answer(trace: Trace, record: DecisionRecord, attempt: Attempt) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if (usage := trace.usage) is not None:
        attributes = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
    if record.ttft_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_ms / 1000 - (
            attempt.begun_s - attempt.decided_s
        )
    change = record.computed.change if record.computed is not None else None
    if change is not None and change.part == "compacted":
        attributes["gen_ai.conversation.compacted"] = True
    return attributes


def _name(trace: Trace, record: DecisionRecord | None) -> str:
    operation = _OPERATIONS.get(record.api) if record is not None else None
    if record is None or operation is None:
        return f"{_method(trace)} {trace.route}"
    return f"{operation} {record.model}" if record.model else operation


def _method(trace: Trace) -> str:
    return trace.method if trace.method in _METHODS else _HTTP


def _failure(record: DecisionRecord) -> str:
    """Return how a request failed: the last try's failure, else its outcome."""
    return (record.tries[-1].failure if record.tries else None) or record.outcome


def _seconds(value_ms: float | None) -> float | None:
    return value_ms / 1000 if value_ms is not None else None


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
