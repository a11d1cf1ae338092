"""Put members into one event of a stream, or into a whole answer; every other byte stays.

The event is kept until it is whole. Of another event that comes in pieces only so much is kept as
might be the beginning of the one that is looked for. What cannot be read goes on as it came: an
event in several `data` lines, or with other line ends than vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from router.api.body_fields import with_changed, with_last_fields
from router.api.usage import NOT_JSON
from router.errors import BadRequest

Members = Callable[[bytes], Mapping[str, Any]]
"""What to put into an object, from its bytes."""

_MOST_BYTES: Final = 1024 * 1024  # of an event, or a whole answer; a longer one goes on as it came
_END: Final = b"\n\n"
_DATA: Final = b"\ndata:"


class Insertion:
    """Puts members into an object of the first event of some kinds.

    Args:
        kinds: Of events.
        name: The member of the event's data that is the object; a whole answer is the object.
        members: Called at most once.
    """

    def __init__(self, kinds: tuple[str, ...], name: str, members: Members) -> None:
        self._heads = tuple(f"event: {kind}\n".encode() for kind in kinds)
        self._longest = max(map(len, self._heads))
        self._name = name
        self._members = members
        self._kept = b""  # what may become the beginning of the event
        self._event: list[bytes] = []  # the event, as far as it has come
        self._num_bytes = 0  # of it
        self._is_inside = False  # an event that is passed on
        self._ends_line = False  # what was passed on ends with a line
        self._is_done = False

    def whole(self, body: bytes) -> bytes:
        """Put the members into a whole answer."""
        if len(body) > _MOST_BYTES:
            return body
        try:
            return self._with_members(body)
        except (BadRequest, *NOT_JSON):
            return body

    def take(self, piece: bytes) -> bytes:
        """Return what goes on after the next piece; nothing if it is kept."""
        if self._is_done or not piece:
            return piece
        if self._event:
            return self._with_piece(piece)
        text, self._kept, at = self._kept + piece, b"", 0
        while True:
            if self._is_inside:
                end = _end_of_event(text, at, ends_line=self._ends_line)
                self._ends_line = text.endswith(b"\n")
                if end < 0:
                    return text
                self._is_inside, at = False, end
            while text.startswith(b"\n", at):
                at += 1
            if text.startswith(self._heads, at):
                return text[:at] + self._with_piece(text[at:])
            head = text[at : at + self._longest]
            if any(each.startswith(head) for each in self._heads):
                self._kept = text[at:]
                return text[:at]
            self._is_inside, self._ends_line = True, False

    def end(self) -> bytes:
        """Return what is kept of an event that did not come whole."""
        kept = self._kept + b"".join(self._event)
        self._kept, self._event = b"", []
        return kept

    def _with_piece(self, piece: bytes) -> bytes:
        """Keep the next piece of the event; return the event, and what follows, if it is whole."""
        last = self._event[-1][-1:] if self._event else b""
        is_whole = _END in last + piece
        self._event.append(piece)
        self._num_bytes += len(piece)
        if not is_whole and self._num_bytes <= _MOST_BYTES:
            return b""
        self._is_done = True
        text = self.end()
        if not is_whole:
            return text
        end = text.index(_END)
        return self._filled(text[:end]) + text[end:]

    def _filled(self, event: bytes) -> bytes:
        head, mark, data = event.partition(_DATA)
        if b"\n" in data or len(data) > _MOST_BYTES:
            return event
        try:
            return head + mark + with_changed(data, self._name, self._with_members)
        except (BadRequest, *NOT_JSON):
            return event

    def _with_members(self, value: bytes) -> bytes:
        return with_last_fields(value, self._members(value))


def _end_of_event(text: bytes, at: int, *, ends_line: bool) -> int:
    """Find where an event ends; -1: behind this text. `ends_line`: a line ended in front of it."""
    if ends_line and text.startswith(b"\n"):
        return 1
    end = text.find(_END, at)
    return end if end < 0 else end + len(_END)
