"""Receive a response's body as soon as bytes of it have come: no task has to wake up for them.

A stream's events come one by one. Waking a task for each, through a dozen awaits, was most of the
cost of passing an event on. Parsing each was half of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, cast

from router.upstream.session import Response

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
    line_end = piece.find(b"\r\n", 0, _LONGEST_LINE)
    size = _SIZES.get(piece[:line_end])
    if size is not None and line_end + size + 4 == len(piece) and piece.endswith(b"\r\n"):
        return piece[line_end + 2 : -2]  # one chunk, as mostly
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
    return b"".join(bodies)


class Taker(Protocol):
    """Takes a body. What it raises would end the connection: it must raise nothing."""

    @property
    def is_over(self) -> bool:
        """Whether it wants no more."""

    def look(self) -> bytes:
        """Pass on what aiohttp has parsed; return the last piece of it."""

    def pass_on(self, body: bytes, chunks: bytes) -> bool:
        """Pass on the body of whole chunks that aiohttp need not parse; False: no more is wanted.

        chunks: The body with its framing, as it came.
        """


@contextmanager
def tapped(response: Response, taker: Taker) -> Iterator[None]:
    """Pass a response's body on as it comes, until its taker wants no more."""
    transport = response.connection.transport
    if transport is None:  # it broke off
        yield
        return
    tap = _Tap(transport, taker)
    try:
        yield
    finally:
        tap.remove()


class _Tap(asyncio.Protocol):
    """Stands in front of a connection's protocol while one body is read.

    It goes with the body's last byte: the connection may have another request in the same turn.
    """

    def __init__(self, transport: asyncio.Transport, taker: Taker) -> None:
        self._transport = transport
        self._reader = cast(asyncio.Protocol, transport.get_protocol())
        self._taker = taker
        self._is_between = False  # the parser stands between two chunks, as far as is known
        transport.set_protocol(self)

    def remove(self) -> None:
        """Leave the connection to its own protocol; a second time does nothing."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._reader)

    def data_received(self, data: bytes) -> None:
        taker = self._taker
        body = body_of_chunks(data) if self._is_between else None
        if body is not None:
            goes_on = taker.pass_on(body, data)
        else:
            self._reader.data_received(data)
            self._is_between = is_between_chunks(data, taker.look())
            goes_on = not taker.is_over
        if not goes_on:
            self.remove()

    def eof_received(self) -> bool | None:
        keep_open = self._reader.eof_received()
        self._taker.look()
        if self._taker.is_over:
            self.remove()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)
        self._taker.look()

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()
