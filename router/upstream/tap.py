"""Look at a response as soon as bytes of it have come: no task has to wake up for them.

A stream's events come one by one. To wake a task for each, and have it go down through a dozen
awaits, was most of what passing an event on cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import aiohttp


@contextmanager
def tapped(response: aiohttp.ClientResponse, look: Callable[[], bool]) -> Iterator[None]:
    """Call `look` after aiohttp has parsed something of a response, until `look` returns True.

    What `look` raises would end the connection: it must raise nothing.
    """
    connection = response.connection
    transport = connection.transport if connection is not None else None
    if transport is None:  # it is here as a whole, or it broke off
        yield
        return
    tap = _Tap(transport, look)
    try:
        yield
    finally:
        tap.remove()


class _Tap(asyncio.Protocol):
    """Stands in front of a connection's protocol while one body is read.

    It goes with the body's last byte: the connection may have another request in the same turn.
    """

    def __init__(self, transport: asyncio.Transport, look: Callable[[], bool]) -> None:
        self._transport = transport
        self._reader = cast(asyncio.Protocol, transport.get_protocol())
        self._look = look
        transport.set_protocol(self)

    def remove(self) -> None:
        """Leave the connection to its own protocol; a second time does nothing."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._reader)

    def data_received(self, data: bytes) -> None:
        self._reader.data_received(data)
        if self._look():
            self.remove()

    def eof_received(self) -> bool | None:
        keep_open = self._reader.eof_received()
        if self._look():
            self.remove()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)
        self._look()

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()
