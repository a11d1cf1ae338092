"""A completion's event stream, read in pieces: whole events, and what they show of the answer.

What must live here: the framing of server-sent events, and the fields of vLLM's chunks that show
what a client has been given. What must not: what is done about it, any I/O.
Source: vLLM 0.32.0, CompletionStreamResponse and ChatCompletionStreamResponse.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.openai import TokenIds
from router.api.usage import NOT_JSON, Usage

DONE: Final = b"[DONE]"
ERROR: Final = b'data: {"error"'
"""How an error begins. JSON escapes quotes inside of strings, so nothing else has these bytes."""

_ENDS: Final = (b"\n\n", b"\r\n\r\n")


class Error(Struct):
    code: int | str | None = None


class _WithError(Struct):
    error: Error | None = None


class Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None


class Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Chunk(Struct):
    """One event's data, of either API."""

    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


_decoder = msgspec.json.Decoder(Chunk)
_error_decoder = msgspec.json.Decoder(_WithError)


def end_of_events(data: bytes) -> int:
    """Find where the last whole event ends; 0: there is none."""
    if data.endswith(_ENDS):
        return len(data)
    ends = [found + len(end) for end in _ENDS if (found := data.rfind(end)) >= 0]
    return max(ends, default=0)


def data_of(events: bytes) -> Iterator[bytes]:
    """Yield the data of each event that has any; `events` are whole ones."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n")
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: ") and b"\n" not in event:  # as engines write them
            yield event[6:]
            continue
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def is_failure(events: bytes) -> bool:
    """Return whether the first of some events is an error of the engine, not of its client."""
    try:
        error = _error_decoder.decode(next(data_of(events), b"")).error
    except NOT_JSON:
        return False
    return error is not None and isinstance(error.code, int) and error.code >= 500


class Transcript:
    """The answer so far, as its client has it, by a stream's events.

    unsound: Why the answer cannot be continued elsewhere; None: it can.
    """

    __slots__ = (
        "_texts",
        "created",
        "finish_reason",
        "has_role",
        "id",
        "ids",
        "is_done",
        "model",
        "num_reported_tokens",
        "prompt_ids",
        "stop_reason",
        "unsound",
        "usage",
    )

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.id: str | None = None
        self.created: int | None = None
        self.model: str | None = None
        self.has_role = False
        self.ids: TokenIds = array("I")
        self.prompt_ids: list[int] | None = None  # None: not known
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.usage: Usage | None = None  # of the last event that had one
        self.num_reported_tokens: int | None = None  # the whole answer's; None: not known (yet)
        self.is_done = False
        self.unsound: str | None = None

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def read(self, events: bytes) -> None:
        """Take in whole events; 1.5 µs each."""
        for data in data_of(events):
            if data == DONE:
                self.is_done = True
                continue
            try:
                self.note(_decoder.decode(data))
            except (*NOT_JSON, TypeError, OverflowError):
                self.unsound = "stream"

    def note(self, chunk: Chunk) -> None:
        """Take in one event."""
        if self.id is None:
            self.id, self.created, self.model = chunk.id, chunk.created, chunk.model
        if chunk.prompt_token_ids is not None:
            self.prompt_ids = chunk.prompt_token_ids
        if chunk.usage is not None:
            self.usage = chunk.usage
            if not chunk.choices:
                self.num_reported_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            self._note_choice(choice)

    def _note_choice(self, choice: Choice) -> None:
        text, delta = choice.text, choice.delta
        if delta is not None:
            text = delta.content
            self.has_role = self.has_role or delta.role is not None
            if delta.reasoning or delta.reasoning_content:
                self.unsound = "reasoning"
            elif delta.tool_calls or delta.refusal:
                self.unsound = "tools"
        if choice.index != 0:
            self.unsound = "choices"
        if text:
            self._texts.append(text)
        if choice.token_ids is not None:
            self.ids.extend(choice.token_ids)
        if choice.prompt_token_ids is not None:
            self.prompt_ids = choice.prompt_token_ids
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
