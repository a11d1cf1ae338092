"""The end of an answer with status 200: whether it is what its engine was asked for.

An error after the first token is an event. An engine that is paused or stopped aborts its requests:
their answers end as if all was well. Both are read once, from the bytes at the end of an answer, so
an event that passes costs nothing.

Source: vLLM 0.32. `finish_reason` is "abort" in chats, completions and generate. In Messages the
`stop_reason` of an abort is missing, or null in a stream (anthropic/serving.py,
`_to_anthropic_stop_reason`). For the Responses API see `router.api.opening`.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from router.api.opening import Begun, kind_of_event
from router.api.usage import NOT_JSON, TAIL_BYTES

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
