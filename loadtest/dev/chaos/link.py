"""A TCP proxy between two processes, which can be disturbed while bytes pass.

    open      bytes pass
    hole      nothing passes in either direction; held bytes arrive when the hole ends, as with TCP
    refuse    nothing listens, and open connections are reset
    slow      every piece is late
    drip      a few bytes at a time

A link is disturbed for new and for open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal, Self

Mode = Literal["open", "hole", "refuse", "slow", "drip"]

_LATE_S: Final = 0.25
_DRIP_BYTES: Final = 64
_DRIP_S: Final = 0.01
_END_TURNS: Final = 100
_PIECE: Final = 64 * 1024
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s


class Link:
    """One port that leads to another."""

    def __init__(self, port: int, to_port: int) -> None:
        self.port = port
        self._to_port = to_port
        self._mode: Mode = "open"
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()  # both ends of every connection
        self._from: set[asyncio.StreamWriter] = set()  # of these, towards who connected

    @classmethod
    @asynccontextmanager
    async def running(cls, port: int, to_port: int) -> AsyncIterator[Self]:
        """Pass connections on for as long as the context lasts."""
        link = cls(port, to_port)
        await link._listen()
        try:
            yield link
        finally:
            link._passes.set()
            link._stop_listening()
            await link._end()

    async def set(self, mode: Mode) -> None:
        """Change how bytes pass, also on connections that are open."""
        before, self._mode = self._mode, mode
        if mode == "hole":
            self._passes.clear()
        else:
            self._passes.set()
        if mode == "refuse":
            self._stop_listening()
            self.reset()
        elif before == "refuse":
            await self._listen()

    def reset(self) -> None:
        """Reset every open connection, on both sides."""
        for writer in list(self._open):
            _reset(writer)

    async def _end(self) -> None:
        """Reset all connections and wait for their ends; cancelled ones would log errors."""
        for _ in range(_END_TURNS):
            self.reset()
            if not self._from:
                return
            await asyncio.sleep(0.01)

    def half_close(self) -> None:
        """End the answers' direction of every open connection; requests still pass."""
        for writer in list(self._from):
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, limit=_PIECE, backlog=512
        )

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self._from.add(writer)
        try:
            await self._passes.wait()
            await self._carry(reader, writer)
        except OSError:
            pass  # nothing listens there, or one side reset: both ends learn it below
        finally:
            self._open.discard(writer)
            self._from.discard(writer)
            _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(
            "127.0.0.1", self._to_port, limit=_PIECE
        )
        self._open.add(there)
        try:
            async with asyncio.TaskGroup() as tg:
                tg.create_task(self._pump(reader, there))
                tg.create_task(self._pump(there_reader, writer))
        except* OSError:
            pass  # a reset on one side becomes one on the other
        else:
            await _close(writer)
        finally:
            self._open.discard(there)
            _reset(there)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on."""
        while piece := await reader.read(_PIECE):
            if self._mode == "slow":
                await asyncio.sleep(_LATE_S)
            if self._mode == "drip":
                for start in range(0, len(piece), _DRIP_BYTES):
                    await self._write(writer, piece[start : start + _DRIP_BYTES])
                    if self._mode == "drip":
                        await asyncio.sleep(_DRIP_S)
            else:
                await self._write(writer, piece)
        await self._passes.wait()
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

    async def _write(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        await self._passes.wait()
        if writer.is_closing():
            raise ConnectionResetError
        try:
            writer.write(piece)
        except RuntimeError as exc:  # this direction was half-closed
            raise ConnectionResetError from exc
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close after what was written has gone."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Cut a connection so that the other side sees a reset, not an end; twice does nothing."""
    if writer.is_closing():
        return
    sock = writer.get_extra_info("socket")
    if isinstance(sock, socket.socket) or hasattr(sock, "setsockopt"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
