"""Take a response's body as soon as bytes of it have come: no task has to wake up for them.

A stream's events come one by one. Waking a task for each, through a dozen awaits, was most of the
cost of passing an event on. Parsing each was half of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from router.upstream.chunks import body_of_chunks, is_between_chunks
from router.upstream.session import Response


class Taker(Protocol):
    """Takes a body. What it raises would end the connection: it must raise nothing."""

    @property
    def is_over(self) -> bool:
        """Whether it wants no more."""

    def look(self) -> bytes:
        """Take what aiohttp has parsed; return the last piece of it."""

    def pass_on(self, body: bytes) -> bool:
        """Take what aiohttp need not parse; False: no more is wanted."""


@contextmanager
def tapped(response: Response, taker: Taker) -> Iterator[None]:
    """Have a response's body taken as it comes, until its taker wants no more."""
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
            goes_on = taker.pass_on(body)
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
