"""Read what an answer says, as far as the next request of its conversation repeats it.

The stream's bytes are folded into text as they come, so little more than the text is kept. What is
longer than `MAX_BYTES`, calls tools, or is not understood has no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of text, and of one event."""

_FOLD_BYTES: Final = 16 * 1024
_STOPPED: Final = frozenset({"stop", "end_turn", "completed"})


class AnswerText:
    """The text of one answer, read from its bytes.

    Args:
        path: Of its API.
        is_event_stream: Whether the bytes are an event stream; else a JSON object.
    """

    __slots__ = ("_bytes", "_is_event_stream", "_read", "finish", "is_bad", "num_bytes",
                 "reasoning", "text")  # fmt: skip

    def __init__(self, path: str, *, is_event_stream: bool) -> None:
        self._read = _READERS.get(path)
        self._is_event_stream = is_event_stream
        self._bytes = bytearray()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.finish: str | None = None
        self.num_bytes = 0
        self.is_bad = self._read is None

    @property
    def is_end_of_turn(self) -> bool:
        """Whether the answer ended by itself and called no tool."""
        return not self.is_bad and self.finish in _STOPPED

    def take(self, piece: bytes) -> None:
        """Add the next piece of the answer."""
        if self.is_bad:
            return
        self._bytes += piece
        if self._is_event_stream and len(self._bytes) > _FOLD_BYTES:
            self._fold()
        if len(self._bytes) + self.num_bytes > MAX_BYTES:
            self._fail()

    def end(self) -> None:
        """Read what is left."""
        if self.is_bad:
            return
        if self._is_event_stream:
            self._bytes += b"\n"
            self._fold()
        else:
            self._event(bytes(self._bytes))
        self._bytes = bytearray()

    def _fail(self) -> None:
        self.is_bad = True
        self._bytes, self.text, self.reasoning = bytearray(), [], []

    def _fold(self) -> None:
        end = self._bytes.rfind(b"\n") + 1
        lines = bytes(self._bytes[:end]).split(b"\n")
        del self._bytes[:end]
        for line in lines:
            if line.startswith(b"data:") and not self.is_bad:
                data = line[5:].strip()
                if data != b"[DONE]":
                    self._event(data)

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
