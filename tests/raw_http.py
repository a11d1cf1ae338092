"""A server that plays bytes, for answers that no HTTP library would write."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

Part = bytes | float | None
"""Bytes to send, seconds to wait, or None: close the connection."""

Play = Callable[[int, bytes], Sequence[Part]]
"""Says what follows a request: its number on its connection, from 0, and its body."""

_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def whole(body: bytes, *headers: str, status: str = "200 OK", kind: str = "json") -> bytes:
    """Write an answer with its length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: application/{kind}", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def stream(*events: bytes) -> bytes:
    """Write an event stream in chunks."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    return head + chunks + b"0\r\n\r\n"


class Player:
    """A server that answers each request with what a play says."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.url = ""
        self.num_connections = 0
        self.requests: list[bytes] = []
        self._connections: list[asyncio.Task[Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.num_connections += 1
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.append(connection)
        ended = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with suppress(*ended):
            try:
                await self._answer(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async def end(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length.group(1)) if length else 0)
            self.requests.append(body)
            for part in self._play(number, body):
                if part is None:
                    return
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            number += 1


@asynccontextmanager
async def playing(play: Play) -> AsyncIterator[Player]:
    """Serve a play."""
    player = Player(play)
    async with await asyncio.start_server(player.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        player.url = f"http://{host}:{port}/"
        try:
            yield player
        finally:
            await player.end()
