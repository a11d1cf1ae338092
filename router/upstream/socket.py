"""A WebSocket, to a client or to a replica: whole messages, and how it ended.

Each side answers pings itself, and nothing is compressed. Sending waits while the other end is
behind; TCP then slows the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import aiohttp
from aiohttp import web
from msgspec import Struct

CLOSE_S = 2.0
"""For the other end's half of a closing handshake."""


class Frame(Struct, frozen=True):
    """A message, or (`data` None) the end with the other side's code.

    `code` None: the connection broke. 0: closed without a code. `is_too_big`: we ended it because a
    message was too big.
    """

    data: str | bytes | None
    code: int | None = None
    reason: str = ""
    is_too_big: bool = False


class Socket:
    """One end of a WebSocket."""

    __slots__ = ("_ws",)

    def __init__(self, ws: aiohttp.ClientWebSocketResponse | web.WebSocketResponse) -> None:
        self._ws = ws

    async def receive(self) -> Frame:
        """Wait for the next message, or for the end."""
        try:
            message = await self._ws.receive()
        except (aiohttp.ClientError, OSError):
            return Frame(None)
        if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            return Frame(message.data)
        if message.type is aiohttp.WSMsgType.CLOSE:
            return Frame(None, message.data or 0, message.extra or "")
        failure = message.data
        is_too_big = (
            isinstance(failure, aiohttp.WebSocketError)
            and failure.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        )
        return Frame(None, is_too_big=is_too_big)

    async def send(self, data: str | bytes) -> bool:
        """Send a message when there is room for it; False: the other end is gone."""
        try:
            if isinstance(data, str):
                await self._ws.send_str(data)
            else:
                await self._ws.send_bytes(data)
        except (aiohttp.ClientError, OSError):
            return False
        return True

    async def close(self, code: int, reason: str = "", *, last: str | None = None) -> None:
        """Close it with an optional last message; no effect if it has ended."""
        message = reason.encode()[:120].decode(errors="ignore").encode()  # 123 bytes fit
        with suppress(aiohttp.ClientError, OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                if last is not None:
                    await self.send(last)
                await self._ws.close(code=code, message=message)


class UpstreamSocket(Socket):
    """A WebSocket to a replica; `on_close` is called once, when it is closed here."""

    __slots__ = ("_on_close",)

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, on_close: Callable[[], None]) -> None:
        super().__init__(ws)
        self._on_close: Callable[[], None] | None = on_close

    async def close(self, code: int, reason: str = "", *, last: str | None = None) -> None:
        try:
            await super().close(code, reason, last=last)
        finally:
            if self._on_close is not None:
                self._on_close()
                self._on_close = None
