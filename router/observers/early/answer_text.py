"""Read what an answer says, as far as the next request of its conversation repeats it.

Most answers call a tool, and their text is not needed. So bytes are kept as they come, and read
at the end or if they exceed `_FOLD_BYTES`. An answer has no text if it is longer than `MAX_BYTES`,
calls tools, is not understood, exceeds the bound of all answers, or has no reasoning in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of text, and of one event."""

_FOLD_BYTES: Final = 16 * 1024
_PIECE_BYTES: Final = 48  # what Python adds to each piece
_CALL: Final = re.compile(
    rb'"(?:finish_reason|stop_reason|type)": ?"(?:tool_calls|tool_use|function_call)"'
)
_REASONING: Final = re.compile(rb'"(?:reasoning|reasoning_content|thinking)"')
_LAST_PIECES: Final = 4
_STOPPED: Final = frozenset({"stop", "end_turn", "completed"})


class Held:
    """Counts the bytes that are kept, of all answers and bodies, those in flight included.

    Args:
        most: The bound, in bytes.
    """

    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many more bytes are within the bound."""
        return self.num_bytes + num_bytes <= self.most

    def take(self, num_bytes: int) -> bool:
        """Count so many more bytes; False: they exceed the bound, and nothing is counted."""
        if not self.fits(num_bytes):
            return False
        self.num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Count so many bytes less."""
        self.num_bytes -= num_bytes


class AnswerText:
    """The text of one answer, read from its bytes.

    Args:
        path: Of its API.
        is_event_stream: Whether the bytes are an event stream; else a JSON object.
        request: The body of its request.
        held: Counts the bytes of all answers.

    text, reasoning: In UTF-8.
    """

    __slots__ = ("_held", "_is_event_stream", "_num_counted", "_num_pieces", "_pieces", "_read",
                 "_request", "finish", "is_bad", "reasoning", "text")  # fmt: skip

    def __init__(self, path: str, *, is_event_stream: bool, request: bytes, held: Held) -> None:
        self._read = _READERS.get(path)
        self._is_event_stream = is_event_stream
        self._request = request
        self._held = held
        self._pieces: list[bytes] = []
        self._num_pieces = 0  # bytes of them
        self._num_counted = 0  # bytes that are counted in `held`
        self.text = bytearray()
        self.reasoning = bytearray()
        self.finish: str | None = None
        self.is_bad = self._read is None

    def __del__(self) -> None:
        self._held.give(self._num_counted)

    @property
    def is_end_of_turn(self) -> bool:
        """Whether the answer ended by itself and called no tool."""
        return not self.is_bad and self.finish in _STOPPED

    @property
    def seems_to_call(self) -> bool:
        """Whether its end names a call of a tool; it is not read for that."""
        return _CALL.search(b"".join(self._pieces[-_LAST_PIECES:])) is not None

    def take(self, piece: bytes) -> None:
        """Add the next piece of the answer."""
        if self.is_bad:
            return
        num_bytes = len(piece) + _PIECE_BYTES
        if not self._held.take(num_bytes):
            self._fail()
            return
        self._num_counted += num_bytes
        self._num_pieces += num_bytes
        self._pieces.append(piece)
        if self._num_pieces > _FOLD_BYTES:
            self._fold()

    def end(self) -> None:
        """Read what is left; idempotent."""
        if self._is_event_stream:
            self._pieces.append(b"\n")
            self._fold()
        elif self._pieces:
            data = b"".join(self._pieces)
            self._keep(b"")
            if not self.is_bad:
                self._event(data)
        if not self.is_bad and not self._may_change():
            self._fail()

    def _may_change(self) -> bool:
        """Return whether there is reasoning that a chat template may leave out of the next prompt.

        Without it, the next prompt goes on from this one and its answer, which are cached.
        """
        return bool(self.reasoning) or _REASONING.search(self._request) is not None

    def _keep(self, rest: bytes) -> None:
        """Keep only these bytes beside the text, and count what is kept."""
        self._pieces = [rest] if rest else []
        self._num_pieces = len(rest)
        num_bytes = len(rest) + len(self.text) + len(self.reasoning)
        self._held.give(self._num_counted - num_bytes)
        self._num_counted = num_bytes

    def _fail(self) -> None:
        self.is_bad = True
        self.text, self.reasoning, self._request = bytearray(), bytearray(), b""
        self._keep(b"")

    def _fold(self) -> None:
        """Read the events that are whole, and keep the rest."""
        data = b"".join(self._pieces)
        end = data.rfind(b"\n") + 1 if self._is_event_stream else 0
        for line in data[:end].split(b"\n"):
            if line.startswith(b"data:") and not self.is_bad:
                event = line[5:].strip()
                if event != b"[DONE]":
                    self._event(event)
        self._keep(b"" if self.is_bad else data[end:])
        is_plain = self.text and not self._may_change()
        if is_plain or self._num_counted > MAX_BYTES:
            self._fail()

    def _event(self, data: bytes) -> None:
        assert self._read is not None
        try:
            self._read(self, orjson.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError):
            self._fail()

    def add(self, text: str | None, *, reasoning: str | None = None) -> None:
        """Add a piece of text, of reasoning, or of both."""
        if text:
            self.text += text.encode()
        if reasoning:
            self.reasoning += reasoning.encode()


def _chat(answer: AnswerText, event: Mapping[str, Any]) -> None:
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or {}
        if choice.get("index") or said.get("tool_calls"):
            answer.finish = "tool_calls"
        reasoning = said.get("reasoning") or said.get("reasoning_content")
        answer.add(said.get("content"), reasoning=reasoning)
        if choice.get("finish_reason") and answer.finish is None:
            answer.finish = choice["finish_reason"]


def _message(answer: AnswerText, event: Mapping[str, Any]) -> None:
    match event.get("type"):
        case "content_block_delta":
            delta = event["delta"]
            answer.add(delta.get("text"), reasoning=delta.get("thinking"))
        case "message_delta":
            answer.finish = event["delta"].get("stop_reason")
        case "message":
            for block in event["content"]:
                answer.add(block.get("text"), reasoning=block.get("thinking"))
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
                    answer.add(part.get("text"))
            case "reasoning":
                for part in item.get("content") or ():
                    answer.add(None, reasoning=part.get("text"))
            case _:
                answer.finish = "tool_calls"


_READERS: Final[dict[str, Callable[[AnswerText, Mapping[str, Any]], None]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
