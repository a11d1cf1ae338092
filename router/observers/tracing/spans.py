"""What the spans of a request that has ended say, from what was noted and its decision record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from router.observers.tracing import names
from router.observers.tracing.trace import Attempt, Span, Trace
from router.records.computed import Computed
from router.records.outcome import Outcome
from router.records.record import DecisionRecord

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_HTTP: Final = "HTTP"  # another method, as the conventions say
_REPLACED: Final = "replaced"
_NO_FAILURE: Final = frozenset(
    {Outcome.OK.value, Outcome.CLIENT_ERROR.value, Outcome.CLIENT_GONE.value, _REPLACED}
)
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
        names.HTTP_METHOD: name if name != _HTTP else "_OTHER",
        names.HTTP_ROUTE: trace.route,
        names.HTTP_STATUS: trace.status,
    }
    error = trace.error if trace.status is None or trace.status >= 500 else None
    if record is not None:
        attributes |= _of_record(record)
        if record.outcome not in _NO_FAILURE:
            error = error or _failure(record)
    if error is None and trace.status is not None and trace.status >= 500:
        error = str(trace.status)
    attributes[names.ERROR_TYPE] = error or trace.error
    for event, at_s, more in sorted(_events(trace, trace.ended_s), key=lambda each: each[1]):
        span.add_event(event, _known(more), trace.at_ns(at_s))
    span.update_name(f"{name} {trace.route}" if trace.route is not None else name)
    _end(span, attributes, error, trace.at_ns(trace.ended_s))


def _end(span: Span, attributes: dict[str, Any], error: str | None, at_ns: int) -> None:
    span.set_attributes(_known(attributes))
    if error is not None:
        from router.observers.tracing.otlp import fail  # late: it needs OpenTelemetry

        fail(span, error)
    span.end(at_ns)


def _of_record(record: DecisionRecord) -> dict[str, Any]:
    assignment = record.assignment
    attributes: dict[str, Any] = {
        names.REQUEST_ID: record.request_id,
        names.MODEL: record.model or None,
        names.TENANT: record.tenant,
        names.SESSION: record.session,
        names.OUTCOME: record.outcome,
        names.REPLICA: record.decision.candidate,
        names.POLICY: record.policy,
        names.REASON: record.decision.reason,
        names.CACHE_STATE: record.state,
        names.VARIANT: assignment.label if assignment is not None else None,
        names.ROUTER_S: record.router_ms / 1000,
        names.WAITED_S: record.waited_ms / 1000,
        names.WAITED_FOR: record.waited_for,
        names.PREDICTED_TTFT_S: _seconds(record.predicted_ttft_ms),
        names.TTFT_S: _seconds(record.ttft_ms),
        names.PROMPT_TOKENS: record.num_prompt_tokens,
        names.PREDICTED_TOKENS: record.num_predicted_cached_tokens,
        names.CACHED_TOKENS: record.num_reported_cached_tokens,
    }
    if record.computed is not None:
        attributes |= _of_causes(record.computed)
    return attributes


def _of_causes(computed: Computed) -> dict[str, Any]:
    change, move, loss = computed.change, computed.move, computed.loss
    return {
        **{names.COMPUTED + cause: num for cause, num in computed.tokens.items()},
        names.CHANGED_PART: change.part if change is not None else None,
        names.CHANGED_OFFSET: change.offset if change is not None else None,
        names.MOVED_FROM: move.origin if move is not None else None,
        names.LOST_AT: loss.replica if loss is not None else None,
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
        yield names.QUEUED, queued_s, {names.WAITED_FOR: record.waited_for}
    for attempt in trace.attempts:
        more = {names.REPLICA: attempt.candidate}
        if attempt is last:
            more |= {names.POLICY: record.policy, names.REASON: record.decision.reason}
        yield names.DECIDED, attempt.decided_s, more
    if record.ttft_ms is not None:
        yield names.FIRST_TOKEN, trace.begun_s + router_s + waited_s + record.ttft_ms / 1000, {}


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
        names.PROVIDER: names.VLLM,
        names.SERVER_ADDRESS: url.hostname,
        names.SERVER_PORT: url.port or _PORTS.get(url.scheme),
        names.REPLICA: attempt.candidate,
        names.ROLE: attempt.role,
        names.TRY: number,
        names.OUTCOME: outcome,
        names.ERROR_TYPE: error,
    }
    if record is not None:
        attributes[names.OPERATION] = names.OPERATIONS.get(record.api)
        attributes[names.MODEL] = record.model or None
        attributes[names.STREAM] = True if trace.streams else None
        if attempt is _answered(trace, record):
            attributes |= _of_answer(trace, record, attempt)
    attempt.span.update_name(_name(trace, record))
    _end(attempt.span, attributes, error, trace.at_ns(attempt.ended_s or trace.ended_s or 0.0))


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
            names.INPUT_TOKENS: usage.prompt_tokens,
            names.CACHE_READ_TOKENS: usage.num_cached_tokens,
            names.OUTPUT_TOKENS: usage.completion_tokens,
        }
    if record.ttft_ms is not None:
        attributes[names.FIRST_CHUNK_S] = record.ttft_ms / 1000 - (
            attempt.begun_s - attempt.decided_s
        )
    change = record.computed.change if record.computed is not None else None
    if change is not None and change.part == "compacted":
        attributes[names.COMPACTED] = True
    return attributes


def _name(trace: Trace, record: DecisionRecord | None) -> str:
    operation = names.OPERATIONS.get(record.api) if record is not None else None
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
