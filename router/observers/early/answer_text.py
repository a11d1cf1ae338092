"""Read what an answer says, as far as the next request of its conversation repeats it.

Most answers call a tool, and their text is not needed. So bytes are kept as they come, and read
at the end or where they are more than `_FOLD_BYTES`. What is longer than `MAX_BYTES`, calls tools,
or is not understood has no text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of text, and of one event."""

_FOLD_BYTES: Final = 64 * 1024
_CALL: Final = re.compile(
    rb'"(?:finish_reason|stop_reason|type)": ?"(?:tool_calls|tool_use|function_call)"'
)
_LAST_PIECES: Final = 4
_STOPPED: Final = frozenset({"stop", "end_turn", "completed"})


class AnswerText:
    """The text of one answer, read from its bytes.

    Args:
        path: Of its API.
        is_event_stream: Whether the bytes are an event stream; else a JSON object.
    """

    __slots__ = ("_is_event_stream", "_num_held", "_pieces", "_read", "finish", "is_bad",
                 "num_bytes", "reasoning", "text")  # fmt: skip

    def __init__(self, path: str, *, is_event_stream: bool) -> None:
        self._read = _READERS.get(path)
        self._is_event_stream = is_event_stream
        self._pieces: list[bytes] = []
        self._num_held = 0  # bytes of them
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.finish: str | None = None
        self.num_bytes = 0
        self.is_bad = self._read is None

    @property
    def is_end_of_turn(self) -> bool:
        """Whether the answer ended by itself and called no tool."""
        return not self.is_bad and self.finish in _STOPPED

    @property
    def seems_to_call(self) -> bool:
        """Whether its end names a call of a tool; it is not read for that."""
        return _CALL.search(b"".join(self._pieces[-_LAST_PIECES:])) is not None

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        return self._num_held + self.num_bytes

    def take(self, piece: bytes) -> None:
        """Add the next piece of the answer."""
        self._pieces.append(piece)
        self._num_held += len(piece)
        if self._num_held > _FOLD_BYTES:
            self._fold()

    def end(self) -> None:
        """Read what is left; idempotent."""
        if self._is_event_stream:
            self._pieces.append(b"\n")
            self._fold()
        elif self._pieces:
            data = b"".join(self._pieces)
            self._hold(b"")
            if not self.is_bad:
                self._event(data)

    def _hold(self, rest: bytes) -> None:
        self._pieces = [rest] if rest else []
        self._num_held = len(rest)

    def _fail(self) -> None:
        self.is_bad = True
        self.text, self.reasoning, self.num_bytes = [], [], 0
        self._hold(b"")

    def _fold(self) -> None:
        """Read the events that are whole, and keep the rest."""
        data = b"".join(self._pieces)
        end = data.rfind(b"\n") + 1 if self._is_event_stream else 0
        self._hold(data[end:])
        for line in data[:end].split(b"\n"):
            if line.startswith(b"data:") and not self.is_bad:
                event = line[5:].strip()
                if event != b"[DONE]":
                    self._event(event)
        if self.is_bad or self.size_bytes > MAX_BYTES:
            self._fail()

    def _event(self, data: bytes) -> None:
        assert self._read is not None
        try:
            self._read(self, orjson.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError):
            self._fail()

    def add(self, parts: list[str], text: str | None) -> None:
        """Add a piece of text."""
        if text:
            parts.append(text)
            self.num_bytes += len(text)


def _chat(answer: AnswerText, event: Mapping[str, Any]) -> None:
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or {}
        if choice.get("index") or said.get("tool_calls"):
            answer.finish = "tool_calls"
        answer.add(answer.text, said.get("content"))
        answer.add(answer.reasoning, said.get("reasoning") or said.get("reasoning_content"))
        if choice.get("finish_reason") and answer.finish is None:
            answer.finish = choice["finish_reason"]


def _message(answer: AnswerText, event: Mapping[str, Any]) -> None:
    match event.get("type"):
        case "content_block_delta":
            delta = event["delta"]
            answer.add(answer.text, delta.get("text"))
            answer.add(answer.reasoning, delta.get("thinking"))
        case "message_delta":
            answer.finish = event["delta"].get("stop_reason")
        case "message":
            for block in event["content"]:
                answer.add(answer.text, block.get("text"))
                answer.add(answer.reasoning, block.get("thinking"))
            answer.finish = event.get("stop_reason")


def _response(answer: AnswerText, event: Mapping[str, Any]) -> None:
    response = event if event.get("object") == "response" else event.get("response")
    if not isinstance(response, dict) or response.get("status") != "completed":
        return
    answer.finish = "completed"
    for item in response["output"]:
        match item.get("type"):
            case "message":
                for part in item["content"]:
                    answer.add(answer.text, part.get("text"))
            case "reasoning":
                for part in item.get("content") or ():
                    answer.add(answer.reasoning, part.get("text"))
            case _:
                answer.finish = "tool_calls"


_READERS: Final[dict[str, Callable[[AnswerText, Mapping[str, Any]], None]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
