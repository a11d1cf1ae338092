"""A TCP proxy between two processes, which can be disturbed while bytes pass.

    open      bytes pass
    hole      nothing passes in either direction; held bytes arrive when the hole ends, as with TCP
    refuse    nothing listens, and open connections are reset
    slow      every piece is late
    drip      a few bytes at a time

A link is disturbed for new and for open connections. Bytes that nobody asked for are sent towards
who connected, on connections that wait for a next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal, Self, cast

Mode = Literal["open", "hole", "refuse", "slow", "drip"]
_Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_LATE_S: Final = 0.25
_DRIP_BYTES: Final = 64
_DRIP_S: Final = 0.01
_END_TURNS: Final = 100
_PIECE: Final = 64 * 1024
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s
_CROSSING_S: Final = 0.002  # between a look at a connection and the first byte of a request on it
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)\r\n")
_REQUEST_ID: Final = re.compile(rb"(?i)\r\nx-request-id: *([^\r\n]+)\r\n")


class _Kept(asyncio.StreamReaderProtocol):
    """A connection as who connected sees it: whether it waits for a next request.

    Bytes are noted as they come, before any task sees them: they are here or still in the socket.

    Args:
        crossed: Takes the ids of requests that a stray came too late for.
    """

    def __init__(self, connected: _Connected, crossed: set[str]) -> None:
        super().__init__(asyncio.StreamReader(limit=_PIECE), connected)
        self._crossed = crossed
        self._socket: socket.socket
        self._out: asyncio.WriteTransport
        self._has_stray = False
        self._is_crossed = False  # a request was on the way when the stray was sent
        self._is_idle = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._out = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its type
        self._socket = transport.get_extra_info("socket")
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._is_idle = False
        if self._is_crossed:
            self._is_crossed = False
            self._crossed.update(id_.decode() for id_ in _REQUEST_ID.findall(data))
        super().data_received(data)

    def answered(self, piece: bytes) -> None:
        """Record a piece of an answer: it ends with a last chunk, or is all of a short answer."""
        self._is_idle = piece.endswith(b"\r\n0\r\n\r\n") or _is_whole(piece)

    def send(self, data: bytes) -> bool:
        """Send bytes at once if it is idle, and has had none; return whether they went out."""
        if self._has_stray or not self._is_idle or self._out.is_closing():
            return False
        if self._out.get_write_buffer_size() or _is_readable(self._socket):
            return False
        os.write(self._socket.fileno(), data)
        self._has_stray = True
        return True

    def end(self) -> None:
        """End it if it is idle."""
        if self._is_idle and not self._out.is_closing():
            self._out.close()

    def look(self) -> None:
        """Record whether a request had been sent before the stray could be seen."""
        self._is_crossed = _is_readable(self._socket)


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
        self._kept: set[_Kept] = set()
        self.num_strays = 0
        self.crossed: set[str] = set()  # ids of requests that a stray came too late for

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

    def stray(self, data: bytes) -> int:
        """Send bytes that nobody asked for on each idle connection, once; return on how many.

        A request that was sent before they came is answered by them, whatever its sender does.
        Such requests are `crossed`. To know them, nothing else may run for a moment.
        """
        sent = [each for each in list(self._kept) if each.send(data)]
        if sent:
            time.sleep(_CROSSING_S)
        for each in sent:
            each.look()
        self.num_strays += len(sent)
        return len(sent)

    def end_idle(self) -> None:
        """End the connections that wait for a next request, as servers do after a while."""
        for each in list(self._kept):
            each.end()

    async def _listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Kept(self._connected, self.crossed), "127.0.0.1", self.port, backlog=512
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
        kept = writer.transport.get_protocol()
        assert isinstance(kept, _Kept)
        self._kept.add(kept)
        try:
            async with asyncio.TaskGroup() as tg:
                tg.create_task(self._pump(reader, there))
                tg.create_task(self._pump(there_reader, writer, kept.answered))
        except* OSError:
            pass  # a reset on one side becomes one on the other
        else:
            await _close(writer)
        finally:
            self._kept.discard(kept)
            self._open.discard(there)
            _reset(there)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passed: Callable[[bytes], None] = lambda piece: None,
    ) -> None:
        """Pass bytes on; `passed` is called with each piece that went out."""
        while piece := await reader.read(_PIECE):
            if self._mode == "slow":
                await asyncio.sleep(_LATE_S)
            if self._mode == "drip":
                for start in range(0, len(piece), _DRIP_BYTES):
                    await self._write(writer, piece[start : start + _DRIP_BYTES], passed)
                    if self._mode == "drip":
                        await asyncio.sleep(_DRIP_S)
            else:
                await self._write(writer, piece, passed)
        await self._passes.wait()
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

    async def _write(
        self, writer: asyncio.StreamWriter, piece: bytes, passed: Callable[[bytes], None]
    ) -> None:
        await self._passes.wait()
        if writer.is_closing():
            raise ConnectionResetError
        try:
            writer.write(piece)
        except RuntimeError as exc:  # this direction was half-closed
            raise ConnectionResetError from exc
        passed(piece)
        await writer.drain()


def _is_whole(piece: bytes) -> bool:
    """Return whether a piece is an answer of a declared length."""
    head, _, body = piece.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n")
    return piece.startswith(b"HTTP/1.1 ") and length is not None and len(body) == int(length[1])


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


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
