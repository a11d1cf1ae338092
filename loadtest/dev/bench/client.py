"""A raw HTTP/1.1 client: one request at a time on one connection, timed; nothing else.

aiohttp or httpx would be slower than what they measure. Only what the fake replicas and the
router send is understood: a declared length, or chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Self, cast

from msgspec import Struct


class Answer(Struct, frozen=True):
    """An answer; `body` of a chunked one still has its chunk marks. Time counts from sending."""

    status: int
    head: bytes
    body: bytes
    total_ms: float

    def header(self, name: str) -> str | None:
        """Find a header; `name` in lower case."""
        return header(self.head, name.encode())


def request_bytes(
    target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Write a request: GET without a body, POST with one."""
    lines = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", "Host: localhost"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join((*lines, "", "")).encode() + (body or b"")


class Connection(asyncio.Protocol):
    """One connection; use as an async context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head: bytes | None = None
        self._end: int | None = None  # of the answer in the buffer; None: chunked
        self._sent_s = 0.0
        self._answer: asyncio.Future[Answer] | None = None

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()

    async def send(self, request: bytes) -> Answer:
        """Send a request and wait for its whole answer.

        Raises:
            ConnectionError: the connection was closed before that.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionError(f"port {self._port}: connection closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        return await self._answer

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"port {self._port}: cut off: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._head is None and not self._read_head():
            return
        if self._end is None:
            is_complete = self._buffer.endswith(b"0\r\n\r\n")
        else:
            is_complete = len(self._buffer) >= self._end
        if is_complete:
            self._complete(time.perf_counter())

    def _read_head(self) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0:
            return False
        self._head = bytes(self._buffer[:at])
        length = header(self._head, b"content-length")
        self._end = at + 4 + int(length) if length is not None else None
        return True

    def _complete(self, now_s: float) -> None:
        assert self._head is not None
        answer = Answer(
            status=int(self._head[9:12]),
            head=self._head,
            body=bytes(self._buffer[len(self._head) + 4 :]),
            total_ms=(now_s - self._sent_s) * 1000,
        )
        self._buffer.clear()
        self._head = self._end = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)


async def pair(
    number: int, direct: Connection, routed: Connection, request: bytes
) -> tuple[Answer, Answer]:
    """Send a request both ways, in alternating order by number; return direct's answer first."""
    if number % 2:
        return await direct.send(request), await routed.send(request)
    answer = await routed.send(request)
    return await direct.send(request), answer


async def hammer(port: int, requests: Sequence[bytes], seconds: float) -> int:
    """Send each request over and over on a connection of its own; return how many answers came.

    Raises:
        RuntimeError: an answer's status is not 200.
    """
    num_done = 0
    end_s = time.perf_counter() + seconds

    async def send_on(request: bytes) -> None:
        nonlocal num_done
        async with Connection(port) as connection:
            while time.perf_counter() < end_s:
                answer = await connection.send(request)
                if answer.status != 200:
                    raise RuntimeError(f"answered {answer.status}: {answer.body[:300]!r}")
                num_done += 1

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(send_on(request), name="load")
    return num_done


def header(head: bytes, name: bytes) -> str | None:
    """Find a header in the bytes of a message's head; `name` in lower case."""
    at = head.lower().find(b"\r\n" + name + b":")
    if at < 0:
        return None
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else None].strip().decode()
