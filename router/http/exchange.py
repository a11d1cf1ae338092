"""One client's request, and the answer to it so far."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from router.api.clients import Client
from router.api.encodings import is_encoded
from router.api.failures import engine_error_event, error_event
from router.base.caller import ANYBODY
from router.base.errors import ShuttingDown, UpstreamBroken
from router.http.access import page_headers

_LAST_WORD_S: Final = 0.5
_COMMENT: Final = b": no token yet\n\n"
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'  # of Messages: its clients expect it
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_AT_ONCE_BYTES: Final = 32 * 1024  # for which an empty write buffer has room
_BEHIND_BYTES: Final = 64 * 1024  # waiting for a client: as much as a transport takes by default
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_IDS_AT_ONCE: Final = 256


def request_ids() -> Iterator[str]:
    """Yield ids that no other router has, 128 random bits each; one system call makes many."""
    while True:
        digits = os.urandom(16 * _IDS_AT_ONCE).hex()
        yield from (digits[start : start + 32] for start in range(0, len(digits), 32))


class Exchange:
    """A request with its id and sender; the story writes the answer to it.

    Args:
        ids: Where its id is from, if the client has given it none.
    """

    __slots__ = (
        "_is_chunked",
        "_is_early",
        "_last",
        "_transport",
        "_written_s",
        "arrived_s",
        "caller",
        "client",
        "request",
        "request_id",
        "response",
    )

    def __init__(self, request: web.BaseRequest, client: Client, ids: Iterator[str]) -> None:
        given = request.headers.get("X-Request-Id", "")
        self.arrived_s = time.monotonic()
        self.request = request
        self.request_id = given if _REQUEST_ID.fullmatch(given) else next(ids)
        self.client = client
        self.caller = ANYBODY  # until its key is looked up
        self.response: web.StreamResponse | None = None
        self._is_chunked = False
        self._is_early = False
        self._last = b""  # the last piece of an answer
        self._written_s = self.arrived_s  # when it was written
        self._transport: asyncio.Transport | None = None  # of an answer that has begun

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers of every answer that no engine gave."""
        return {
            "x-warmroute-request-id": self.request_id,
            **page_headers(self.request.headers),
        }

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer; `is_own`: the router's own.

        A small answer is sent at once, because recording the request, which comes next, would delay
        it by 0.1 to 0.3 ms. A large one is sent when the handler returns it.
        """
        if self._is_early:
            if is_encoded(headers):
                raise UpstreamBroken("", "the answer is compressed, which was not asked for")
            self._is_early = False
            if status != 200:
                body = engine_error_event(body, self.request.path)
            self.put(body)
            return
        if is_own:
            headers.update(self.own_headers)
        self.response = response = web.Response(status=status, headers=headers, body=body)
        if len(body) <= _AT_ONCE_BYTES:
            with suppress(ConnectionError):  # aiohttp detects that, too
                await response.prepare(self.request)
                await response.write_eof()

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length.

        Raises:
            UpstreamBroken: its client takes a stream for begun, and it is an error.
        """
        if self._is_early:
            if is_encoded(headers):
                replica = headers.get("x-warmroute-replica", "")
                raise UpstreamBroken(replica, "the answer is compressed, which was not asked for")
            if status != 200:
                replica = headers.get("x-warmroute-replica", "")
                raise UpstreamBroken(replica, f"replica {replica} answered with status {status}")
            self._is_early = False
            return
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self.request)
        self._is_chunked = "Transfer-Encoding" in self.response.headers
        self._transport = self.request.transport

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once."""
        assert self.response is not None
        if chunk:
            self._last, self._written_s = chunk, time.monotonic()
            await self.response.write(chunk)

    def put(self, chunk: bytes, framed: bytes | None = None) -> bool:
        """Send the next piece, at once; False: the client is behind, see `catch_up`.

        As aiohttp would write it, without its three coroutines.

        Args:
            chunk: The piece.
            framed: The same in whole chunks. None: it is still to be framed.

        Raises:
            ConnectionError: the client has left.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        self._last, self._written_s = chunk, time.monotonic()
        if not self._is_chunked:
            transport.write(chunk)
        else:
            transport.write(framed or b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return transport.get_write_buffer_size() <= _BEHIND_BYTES

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""
        await self.request.writer.drain()

    async def keep_alive(self, every_s: float, headers: Callable[[], Mapping[str, str]]) -> None:
        """Write a keep-alive to a stream's client after each silence of `every_s`; runs on.

        With one before the first token the answer begins: what goes wrong from there on comes as
        an event. Inside an answer they stand between events.
        """
        keep_alive = _PING if self.request.path.startswith("/v1/messages") else _COMMENT
        self._written_s = time.monotonic()
        with suppress(ConnectionError):  # the writer of the answer detects it
            while True:
                left_s = self._written_s + every_s - time.monotonic()
                if left_s > 0.0:
                    await asyncio.sleep(left_s)
                    continue
                if self.response is None:
                    begun = {
                        "Content-Type": "text/event-stream; charset=utf-8",
                        "Cache-Control": "no-cache",
                        **self.own_headers,
                        **headers(),
                    }
                    await self.start(200, CIMultiDict(begun))
                    self._is_early = True
                if self._is_early or self._is_between_events():
                    self.put(keep_alive)
                else:
                    await asyncio.sleep(every_s)

    def _is_between_events(self) -> bool:
        """Return whether a keep-alive may be written into a stream now."""
        is_plain = self.response is not None and "Content-Encoding" not in self.response.headers
        return is_plain and self.is_stream and self._last.endswith(_EVENT_ENDS)

    @property
    def is_early(self) -> bool:
        """Whether a stream has begun and its client has read nothing but keep-alives."""
        return self._is_early

    @property
    def is_stream(self) -> bool:
        """Whether the answer has begun and takes events."""
        return (
            self.response is not None
            and self.response.content_type == "text/event-stream"
            and not is_encoded(self.response.headers)
        )

    async def cut(self, error: ShuttingDown) -> None:
        """Write to a stream's client that the rest will not come, if it takes that at once."""
        if self.is_stream:
            self._is_early = False
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self.write(error_event(error, self.request.path))

    def abort(self) -> web.StreamResponse:
        """Close a connection whose answer cannot be finished: its length would be a lie."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return self.response or web.Response(status=499)
