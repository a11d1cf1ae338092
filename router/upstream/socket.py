"""One end of a connection that has become a WebSocket: its bytes, as they come."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import StreamWriter

from router.api.realtime import Frames

_READ_BYTES: Final = 64 * 1024  # that wait to be taken; beyond twice that, reading pauses


class Socket:
    """One end of a WebSocket; aiohttp's protocol calls `feed_data` and `feed_eof`.

    content: What has come, and was not taken.
    sent: The frames that were written to it.
    """

    __slots__ = ("_writer", "content", "sent")

    def __init__(self, protocol: BaseProtocol) -> None:
        loop = asyncio.get_running_loop()
        self.content = aiohttp.StreamReader(protocol, _READ_BYTES, loop=loop)
        self.sent = Frames()
        self._writer = StreamWriter(protocol, loop)
        if protocol.transport is None:
            self.content.feed_eof()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Receive bytes."""
        self.content.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """Receive the end."""
        self.content.feed_eof()

    async def read(self) -> bytes:
        """Wait for the next bytes; nothing at the end, however it came."""
        try:
            return await self.content.readany()
        except (aiohttp.ClientError, OSError):
            return b""

    async def write(self, data: bytes) -> int:
        """Write bytes, and wait for an end that is behind; return the number of messages.

        Raises:
            ConnectionError: the other end is gone.
        """
        num_messages = self.sent.take(data)
        await self._writer.write(data)
        return num_messages

    async def close(self, code: int, message: str, error: str) -> None:
        """Write an error and a closing frame to a client, if its connection can take them.

        Raises:
            ConnectionError: the client is gone.
        """
        await self.write(self.sent.last(code, message, error))
