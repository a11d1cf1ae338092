"""Answers on the wire: how they begin and end, what they used, and errors in each API's own JSON.

An answer's beginning is read until something was generated. vLLM answers 200 before it knows
whether a request will work. What fails then (an object of the pool is gone, a step of the engine
raised) is an event, behind what comes before the first token: a role, an id, a message without
content. Up to there a request can be answered elsewhere as well.

An answer's end tells whether it is what its engine was asked for. An error after the first token is
an event. An engine that is paused or stopped aborts its requests: their answers end as if all was
well. Both are read once, from the bytes at the end of an answer, so an event that passes costs
nothing. Usage is read there, too. Nothing is added to a request to get it: a stream whose client
did not ask for usage has none.

Source: vLLM 0.32 entrypoints.

    openai/chat_completion   the role first, then the error, then [DONE]
    openai/completion        an abort before a token is [DONE] alone
    anthropic                `event: error`, type internal_error whatever it was; an abort is a
                             `message_delta` whose `stop_reason` is null
                             (anthropic/serving.py, `_to_anthropic_stop_reason`)
    openai/responses         response.created and response.in_progress before anything is computed;
                             an abort is `response.completed` without an output token; usage is in
                             the last event alone, near its end (responses/protocol.py,
                             ResponseUsage)

`finish_reason` is "abort" in chats, completions and generate. Errors: serve/exception_handling
(OpenAI routes: `code` is the status), and Anthropic's error object for `/v1/messages`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from router.base.errors import (
    MethodNotAllowed,
    NoReplicaAvailable,
    Overloaded,
    RequestKills,
    RetryLater,
    RouterError,
    ShuttingDown,
)

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_MOST_BYTES = 1_000  # of what is no error of an API


def error_body(error: RouterError, path: str) -> bytes:
    """Write `error` as the API behind `path` would."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.status,
            }
        }
    )


def error_event(error: RouterError, path: str) -> bytes:
    """Write `error` as a server-sent event."""
    body = error_body(error, path)
    if path.startswith("/v1/responses"):
        body = _of_responses(orjson.loads(body), error.code, error.message, error.param)
    return _event(body, path)


def engine_error_event(body: bytes, path: str) -> bytes:
    """Write the body of an engine's error as a server-sent event of its API.

    One that is no JSON object with an error in it goes out as a message.
    """
    try:
        found = orjson.loads(body)
        error = found["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, code, param = body[:_MOST_BYTES].decode(errors="replace"), None, None
        found = {"error": {"message": message, "type": "BadGatewayError"}}
    if path.startswith("/v1/responses"):
        return _event(_of_responses(found, code, message, param), path)
    return _event(orjson.dumps(found), path)


def _of_responses(body: dict[str, Any], code: Any, message: Any, param: Any) -> bytes:
    """Write an error for the Responses API: its clients look for `type`, OpenAI's for `error`."""
    return orjson.dumps({"type": "error", "code": code, "message": message, "param": param} | body)


def _event(body: bytes, path: str) -> bytes:
    """Write an error's body, of one line, as an event; the empty line first ends a broken one."""
    named = path.startswith(("/v1/messages", "/v1/responses"))
    return b"\n\n" + (b"event: error\n" if named else b"") + b"data: " + body + b"\n\n"


def error_headers(error: RouterError) -> dict[str, str]:
    """Return the headers that belong to the answer."""
    if isinstance(error, RetryLater | NoReplicaAvailable):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, MethodNotAllowed):
        return {"Allow": error.allowed}
    if isinstance(error, RequestKills):
        return {"x-should-retry": "false"}  # OpenAI's and Anthropic's SDKs heed it
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | ShuttingDown):
        return {"Retry-After": "1"}
    return {}


TAIL_BYTES = 16 * 1024
"""How much of a stream's end is kept: vLLM sends usage in the last event before `[DONE]`."""


NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What bytes that are no JSON make msgspec raise; the last for brackets without end."""


class PromptDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(Struct, frozen=True):
    """`cached_tokens` is None where the engine runs without --enable-prompt-tokens-details."""

    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Count the prompt tokens the engine took from a cache; None: not reported."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _WithUsage(Struct):
    usage: Usage | None = None


_decoder = msgspec.json.Decoder(_WithUsage)


def usage_of_body(body: bytes) -> Usage | None:
    """Read the usage of a non-streaming answer; None: there is none, or it is not JSON."""
    try:
        return _decoder.decode(body).usage
    except NOT_JSON:
        return None


def usage_of_stream(
    tail: bytes, read: Callable[[bytes], Usage | None] = usage_of_body
) -> Usage | None:
    """Read the usage from the end of an event stream (its last `TAIL_BYTES` or more).

    Args:
        read: Reads that of one event's data.
    """
    end = len(tail)
    while (found := tail.rfind(b'"usage"', 0, end)) >= 0:
        start = tail.rfind(b"\n", 0, found) + 1
        line = tail[start : _line_end(tail, found)]
        if line.startswith(b"data:"):
            usage = read(line[5:].strip())
            if usage is not None:
                return usage
        end = start
    return None


def _line_end(tail: bytes, position: int) -> int:
    end = tail.find(b"\n", position)
    return end if end >= 0 else len(tail)


_KEY: Final = b'"usage":'
_LONGEST: Final = 4096  # bytes of a usage


class _ResponseUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: PromptDetails | None = None


class _ResponseBody(Struct, frozen=True):
    usage: _ResponseUsage | None = None


_response_decoder = msgspec.json.Decoder(_ResponseBody)
_decode_value = json.JSONDecoder().raw_decode


def usage_of_response(body: bytes) -> Usage | None:
    """Read the usage of a whole answer; None: there is none, or it is not JSON."""
    try:
        return _usage(_response_decoder.decode(body).usage)
    except NOT_JSON:
        return None


def usage_of_responses(tail: bytes) -> Usage | None:
    """Read the usage from the end of an event stream, whose last event may begin before it."""
    end = len(tail)
    while (found := tail.rfind(_KEY, 0, end)) >= 0:
        start = found + len(_KEY)
        text = tail[start : start + _LONGEST].decode(errors="replace").lstrip()
        try:
            value, _ = _decode_value(text)
            usage = _usage(msgspec.convert(value, _ResponseUsage | None))
        except (ValueError, RecursionError):  # of a tool's parameters, for instance
            usage = None
        if usage is not None:
            return usage
        end = found
    return None


def _usage(usage: _ResponseUsage | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        prompt_tokens_details=usage.input_tokens_details,
    )


MAX_BYTES: Final = 64 * 1024
"""The longest beginning that is held: `return_token_ids` brings the prompt's ids with the role."""

_PREAMBLES: Final = frozenset(
    {"ping", "message_start", "response.created", "response.in_progress", "response.queued"}
)
# They repeat the request's instructions and tools: too long to be decoded for their type.
_LONG_PREAMBLES: Final = (
    b"event: response.created\n",
    b"event: response.in_progress\n",
    b"event: response.queued\n",
)

# Source: Anthropic's and OpenAI's error types, those whose fault is the client's.
_STATUS_BY_TYPE: Final = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "NotFoundError": 404,
    "invalid_prompt": 400,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 503,
}

# Source: pydantic's text of a ValidationError, in vLLM 0.32 anthropic/serving.py.
_QUOTED_STATUS: Final = re.compile(r"input_value=\{'error': .{0,60}'code': ([45][0-9]{2})\}\}")


class Begun(Enum):
    """What the beginning of a stream is, where it is no error."""

    NOT_YET = "not_yet"  # nothing was generated so far
    CONTENT = "content"
    ABORTED = "aborted"  # the engine gave the request up before it generated anything
    ENDED = "ended"  # the stream's last event has come, and nothing was generated


class Opening:
    """Reads a beginning as it grows, each event once."""

    __slots__ = ("_num_read",)

    def __init__(self) -> None:
        self._num_read = 0  # bytes of events without content

    def read(self, beginning: bytes) -> Begun | int:
        """Read what came so far: whether something was generated; the HTTP status of an error.

        Only events that are whole count. An event that is not understood is content: it is the
        client's.
        """
        # Mostly \n; \r\n and \r are allowed (WHATWG HTML section 9.2.5).
        if b"\r" in beginning:
            plain = beginning.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            return _first_kind(plain.split(b"\n\n")[:-1])
        end = beginning.rfind(b"\n\n", self._num_read)
        if end < 0:
            return Begun.NOT_YET
        kind = _first_kind(beginning[self._num_read : end].split(b"\n\n"))
        self._num_read = end + 2
        return kind


def opening_of(beginning: bytes) -> Begun | int:
    """Read a beginning at once; see `Opening.read`."""
    return Opening().read(beginning)


def _first_kind(events: list[bytes]) -> Begun | int:
    kinds = map(kind_of_event, events)
    return next((kind for kind in kinds if kind is not Begun.NOT_YET), Begun.NOT_YET)


def kind_of_event(event: bytes) -> Begun | int:
    """Read one event, of lines that end with \\n: as `Opening.read`."""
    if event.startswith(_LONG_PREAMBLES):
        return Begun.NOT_YET
    data = b"\n".join([line[5:] for line in event.split(b"\n") if line.startswith(b"data:")])
    if not data.strip():  # a comment, or just an event's name
        return Begun.NOT_YET
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Begun.ENDED if data.strip() == b"[DONE]" else Begun.CONTENT
    if not isinstance(value, dict):
        return Begun.CONTENT
    kind = value.get("type")
    error = _error_in(value, kind)
    if error is not None:
        return _status(error)
    if isinstance(kind, str):
        return _kind_of_named(kind, value)
    choices = value.get("choices")
    if not isinstance(choices, list):
        return Begun.CONTENT
    if any(map(_has_content, choices)):
        return Begun.CONTENT
    is_aborted = any(choice.get("finish_reason") == "abort" for choice in choices)
    return Begun.ABORTED if is_aborted else Begun.NOT_YET


def _kind_of_named(kind: str, value: Mapping[str, Any]) -> Begun:
    """Read an event of the Messages or the Responses API that is no error."""
    if kind in _PREAMBLES:
        return Begun.NOT_YET
    if kind == "message_stop":
        return Begun.ENDED
    if kind == "message_delta":
        delta = value.get("delta")
        reason = delta.get("stop_reason", "") if isinstance(delta, dict) else ""
        return Begun.ABORTED if reason in (None, "abort") else Begun.CONTENT
    if kind == "response.completed" and _is_aborted_response(value.get("response")):
        return Begun.ABORTED
    return Begun.CONTENT


def _is_aborted_response(response: object) -> bool:
    """Return whether a response of the Responses API was given up by its engine.

    vLLM 0.32 says "cancelled" for one of its parsers. With the others it says "completed" though
    not one token was generated.
    """
    if not isinstance(response, dict):
        return False
    usage = response.get("usage")
    num_tokens = usage.get("output_tokens") if isinstance(usage, dict) else None
    return response.get("status") == "cancelled" or num_tokens == 0


def _error_in(value: Mapping[str, Any], kind: object) -> Mapping[str, Any] | None:
    """Find the error of an event that is one, in any of the APIs' shapes."""
    if kind == "response.failed":
        response = value.get("response")
        error = response.get("error") if isinstance(response, dict) else None
        return error if isinstance(error, dict) else {}
    error = value.get("error")
    if isinstance(error, dict):
        return error
    return value if kind == "error" or value.get("object") == "error" else None


def _status(error: Mapping[str, Any]) -> int:
    """Find an error's status: its number, else what its name means, else the engine's fault.

    vLLM 0.32 calls every error inside a Messages stream `internal_error`. Its text then quotes the
    beginning and the end of the error of the chat below, which has the number.
    """
    for key in ("code", "status", "type"):
        value = error.get(key)
        if isinstance(value, str):
            is_number = value.isdecimal() and len(value) == 3
            value = int(value) if is_number else _STATUS_BY_TYPE.get(value)
        if isinstance(value, int) and 400 <= value <= 599:
            return value
    quoted = _QUOTED_STATUS.search(str(error.get("message")))
    return int(quoted[1]) if quoted is not None else 500


def _has_content(choice: object) -> bool:
    """Return whether a chunk's choice has anything but a role; that it was aborted is nothing."""
    if not isinstance(choice, dict):
        return True
    if choice.get("finish_reason") not in (None, "abort"):
        return True
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(
        value not in (None, "", [], {}) for key, value in delta.items() if key != "role"
    )


_NUM_EVENTS: Final = 4  # an error, [DONE], the empty line behind it
_OUTER_BYTES: Final = 128
_ABORT: Final = re.compile(rb'"(?:finish|stop)_reason": ?"abort"')
_CANCELLED: Final = re.compile(rb'"status": ?"cancelled", ?"text":')  # of a response, in its order
_FIRST_LINE: Final = re.compile(rb"(?:\A|[\r\n])(?:event|data):")

DONE: Final = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]")
MESSAGE_STOP: Final = re.compile(rb'(?:\A|[\r\n])event: ?message_stop\b|"type": ?"message_stop"')
RESPONSE_END: Final = re.compile(
    rb"(?:\A|[\r\n])event: ?response\.(?:completed|incomplete|failed)\b"
    rb'|"type": ?"response\.(?:completed|incomplete|failed)"'
)
"""The last event of a stream, by API. Text of an answer has no line breaks or plain quotes."""


class Ending(Enum):
    """How an answer ended that is no error."""

    WHOLE = "whole"
    ABORTED = "abort"  # the engine gave it up
    CUT = "no_end"  # the last event of its API is missing


def ending_of_stream(tail: bytes, last: re.Pattern[bytes] | None) -> Ending | int | None:
    """Read the end of a stream; a number is the HTTP status of the error that it ends with.

    None: it is not known whether it came to its end.

    Args:
        tail: The last bytes, from the middle of an event or from the stream's beginning.
        last: How its last event is known. None: it is not known.
    """
    if tail.endswith(b"\r\n"):
        tail = tail.replace(b"\r\n", b"\n")
    end = _last_events(tail)
    events = end.split(b"\n\n")
    kinds = [kind_of_event(event) for event in events]
    errors = [kind for kind in kinds if isinstance(kind, int)]
    if errors:
        return max(errors)
    said = [kind for kind in kinds if kind in (Begun.CONTENT, Begun.ABORTED)]
    if said[-1:] == [Begun.ABORTED] or says_abort(end):
        return Ending.ABORTED
    if last is None:
        return None
    if last is RESPONSE_END and b'"cancelled"' in end and _CANCELLED.search(end):
        return Ending.ABORTED
    found = next(filter(None, (last.search(_outer(event)) for event in reversed(events))), None)
    if found is None:
        # A last event that is longer than what is kept may have said so in its first line.
        is_known = len(tail) < TAIL_BYTES or _FIRST_LINE.search(tail)
        return Ending.CUT if is_known else None
    return 500 if b"response.failed" in found[0] else Ending.WHOLE


def says_abort(tail: bytes) -> bool:
    """Return whether the end of a whole answer says that its engine gave it up."""
    return b'"abort"' in tail and _ABORT.search(tail) is not None


def _last_events(tail: bytes) -> bytes:
    """Return the last events: to look for patterns in all of a tail takes 0.3 ms."""
    start = len(tail)
    for _ in range(_NUM_EVENTS):
        if (start := tail.rfind(b"\n\n", 0, start)) < 0:
            return tail
    return tail[start:]


def _outer(event: bytes) -> bytes:
    """Return where an event says what it is: its first line, and the end of its last."""
    return event if len(event) <= 2 * _OUTER_BYTES else event[:_OUTER_BYTES] + event[-_OUTER_BYTES:]


class _Choice(Struct):
    finish_reason: str | None = None


class _Choices(Struct):
    choices: list[_Choice] = []


class _Message(Struct):
    type: str | None = None
    stop_reason: str | None = None


class _Usage(Struct):
    output_tokens: int | None = None


class _Response(Struct):
    status: str | None = None
    usage: _Usage | None = None


_choices = msgspec.json.Decoder(_Choices)
_message = msgspec.json.Decoder(_Message)
_response = msgspec.json.Decoder(_Response)


def is_aborted_chat(body: bytes) -> bool:
    """Return whether an engine gave up a whole answer of a chat or completion."""
    if b'"abort"' not in body:
        return False
    try:
        return any(each.finish_reason == "abort" for each in _choices.decode(body).choices)
    except NOT_JSON:
        return False


def is_aborted_message(body: bytes) -> bool:
    """Return whether an engine gave up a whole answer of the Messages API."""
    try:
        message = _message.decode(body)
    except NOT_JSON:
        return False
    return message.type == "message" and message.stop_reason in (None, "abort")


def is_aborted_whole_response(body: bytes) -> bool:
    """Return whether an engine gave up a whole answer of the Responses API."""
    try:
        response = _response.decode(body)
    except NOT_JSON:
        return False
    usage = response.usage
    return response.status == "cancelled" or (usage is not None and usage.output_tokens == 0)
