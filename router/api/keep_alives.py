"""What keeps a stream's connection open and says nothing: comments, empty lines, pings.

Source: vLLM 0.32 entrypoints/serve/utils/sse_keep_alive.py (`--sse-keep-alive-interval`, for chat
and completions); Anthropic's `ping` events; WHATWG HTML section 9.2 (comments, empty data).
"""

from __future__ import annotations

import re
from typing import Final

MAX_BYTES: Final = 64 * 1024
"""Of a line without an end; a longer one counts as an event."""

_LINES: Final = re.compile(
    rb'(?:(?::[^\r\n]*|data:?[ \t]*|event: ?ping|data: ?\{"type": ?"ping"\}|)(?:\r\n|\r|\n))*'
)
_FORMS: Final = (
    b"data:  ",
    b"event: ping",
    b"event:ping",
    b'data: {"type": "ping"}',
    b'data: {"type":"ping"}',
    b'data:{"type": "ping"}',
    b'data:{"type":"ping"}',
)
_SAID: Final = b"data: -"  # stands for the beginning of an event's line


class KeepAlives:
    """Tells keep-alives from what an engine says, in a stream that comes in pieces.

    unfinished: The beginning of a line that is a keep-alive so far.
    """

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = b""  # of the line that the next piece goes on with

    @property
    def unfinished(self) -> bytes:
        return b"" if self._begun is _SAID else self._begun

    def are_all(self, piece: bytes) -> bool:
        """Return whether a piece has keep-alives alone, as far as it shows."""
        begun = self._begun
        text = begun + piece if begun else piece
        match = _LINES.match(text)
        assert match is not None  # it matches nothing, too
        rest = text[match.end() :]
        if not rest or (_may_become_one(rest) and len(rest) <= MAX_BYTES):
            self._begun = rest
            return True
        self._begun = b"" if piece.endswith((b"\n", b"\r")) else _SAID
        return False


def _may_become_one(line: bytes) -> bool:
    """Return whether a line that has not ended is a keep-alive so far."""
    if b"\n" in line or b"\r" in line:
        return False
    return line.startswith(b":") or any(form.startswith(line) for form in _FORMS)
