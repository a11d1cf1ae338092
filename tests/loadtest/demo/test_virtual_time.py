"""The loop in virtual time: waiting, threads, connections, and going live."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from loadtest.demo.memory_wires import MemoryTransport, Wires
from loadtest.demo.virtual_time import Clock, VirtualLoop

HOUR_S = 3600.0
REAL = time.monotonic

Play = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


@pytest.fixture
def play(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a coroutine in a virtual loop."""
    for name in ("listen", "accept"):
        monkeypatch.setattr(socket.socket, name, getattr(socket.socket, name))
    wires = Wires.install()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock, wires)) as runner:
            return runner.run(work)

    return run


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a whole message with its capitals, a minute later."""
    said = await reader.read()
    await asyncio.sleep(60.0)
    writer.write(said.upper())
    writer.close()


async def _serve() -> tuple[asyncio.Server, Any]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()


async def _ask(address: Any, text: bytes) -> bytes:
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock)
    for at in range(len(text)):
        writer.write(text[at : at + 1])
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def test_hours_pass_in_no_time_and_in_order(play: Play) -> None:
    """Sleepers wake in the order of their times, at their times."""
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time() - began_s))

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleep("late", 2 * HOUR_S))
            group.create_task(sleep("soon", HOUR_S))

    began_s = REAL()
    play(work())

    assert woken == [("soon", HOUR_S), ("late", 2 * HOUR_S)]
    assert REAL() - began_s < HOUR_S / 60


def test_work_for_a_thread_is_done_at_once(play: Play) -> None:
    """Its result and its error come as from a thread, and the clock stands still."""

    def fail() -> None:
        raise LookupError("nothing there")

    async def work() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        found = await loop.run_in_executor(None, int, "7")
        with pytest.raises(LookupError, match="nothing there"):
            await asyncio.to_thread(fail)
        return found, loop.time() - began_s

    assert play(work()) == (7, 0.0)


def test_bytes_take_no_time_and_servers_take_theirs(play: Play) -> None:
    """A message in pieces arrives whole, with its end; the answer comes a minute later."""

    async def work() -> tuple[bytes, bytes, float]:
        server, address = await _serve()
        async with server:
            began_s = asyncio.get_running_loop().time()
            answers = await asyncio.gather(_ask(address, b"one"), _ask(address, b"two"))
            return *answers, asyncio.get_running_loop().time() - began_s

    assert play(work()) == (b"ONE", b"TWO", 60.0)


def test_a_port_at_which_nobody_listens_refuses(play: Play) -> None:
    """It fails as the kernel would fail it, also after a server has left."""

    async def work() -> None:
        server, address = await _serve()
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await _ask(address, b"hello")

    play(work())


def test_a_reader_that_pauses_loses_nothing(play: Play) -> None:
    """Bytes, and the end behind them, wait until it reads on."""
    got: list[bytes] = []

    class Slow(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, MemoryTransport)
            transport.pause_reading()
            asyncio.get_running_loop().call_later(HOUR_S, transport.resume_reading)

        def data_received(self, data: bytes) -> None:
            got.append(data)

    async def work() -> float:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Slow, "127.0.0.1", 0)
        began_s = loop.time()
        assert await _ask(server.sockets[0].getsockname(), b"hello") == b""
        server.close()
        return loop.time() - began_s

    assert play(work()) == HOUR_S
    assert b"".join(got) == b"hello"


def test_live_time_goes_on_where_virtual_time_ended(play: Play, clock: Clock) -> None:
    """The clock keeps its time, real seconds pass, and the kernel carries new connections."""

    async def work() -> float:
        await asyncio.sleep(HOUR_S)
        before_s = clock.monotonic()
        clock.go_live()
        real_s = REAL()
        await asyncio.sleep(0.05)
        passed_s = clock.monotonic() - before_s
        assert 0.05 <= passed_s + 0.001
        assert passed_s <= REAL() - real_s + 0.05
        gone = asyncio.Event()

        async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            await writer.wait_closed()
            gone.set()

        server = await asyncio.start_server(leave, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert not isinstance(writer.transport, MemoryTransport)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await gone.wait()
        server.close()
        return passed_s

    assert play(work()) < HOUR_S
