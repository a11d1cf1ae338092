"""Chunks of a body, read without a parser, where a piece holds whole ones and nothing else.

An engine writes an event as one chunk, and it arrives as one piece. aiohttp's parser and reader
take ten calls for it. What must not live here: a second parser of HTTP. What is large, or not just
as servers write it (RFC 9112, section 7.1: a size in lower case, without zeros before it, no
extension), is left to aiohttp's.
"""

from __future__ import annotations

from typing import Final

_SIZES: Final = {b"%x" % size: size for size in range(1, 2048)}
"""Looked up in half the time that it takes to parse a number and to see that it is a plain one."""

_LONGEST_LINE: Final = 5  # three digits and the line's end
_EVENT_END: Final = b"\n\n"
_EVENT_AND_CHUNK_END: Final = b"\n\n\r\n"


def is_between_chunks(piece: bytes, body: bytes) -> bool:
    """Return whether a parser stands between two chunks, after an event.

    Args:
        piece: What it was fed last.
        body: The last of what it made of that; all that it made of it has been taken.

    Inside a chunk it would have handed over the line's end, too; behind a chunk's size the line
    before would not be empty.
    """
    return piece.endswith(_EVENT_AND_CHUNK_END) and body.endswith(_EVENT_END)


def body_of_chunks(piece: bytes) -> bytes | None:
    """Return the body of whole chunks; None: something else is there, the last chunk included.

    Args:
        piece: It begins where a chunk does.
    """
    bodies = []
    start, end = 0, len(piece)
    while start < end:
        line_end = piece.find(b"\r\n", start, start + _LONGEST_LINE)
        size = _SIZES.get(piece[start:line_end])
        if size is None:
            return None
        body_start = line_end + 2
        body_end = body_start + size
        start = body_end + 2
        if piece[body_end:start] != b"\r\n":
            return None
        bodies.append(piece[body_start:body_end])
    return bodies[0] if len(bodies) == 1 else b"".join(bodies)
