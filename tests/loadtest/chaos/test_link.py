"""A link passes bytes on, and is cut, held and slowed on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loadtest.dev.chaos.link import Link, Mode
from tests.ports import free_port


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """A link to a server that says everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()

    port = free_port()
    server = await asyncio.start_server(echo, "127.0.0.1", port)
    async with Link.running(free_port(), port) as link:
        yield link
    server.close()


async def say(link: Link, text: bytes) -> bytes:
    """Send something and end; read what comes back."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(text)
        writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("mode", ["open", "slow", "drip"])
async def test_bytes_pass_in_order(link: Link, mode: Mode) -> None:
    """However slow the way is, all arrives."""
    await link.set(mode)
    text = bytes(range(256)) * 2

    assert await say(link, text) == text


async def test_what_a_hole_held_arrives_when_it_ends(link: Link) -> None:
    """As TCP would have sent it again."""
    await link.set("hole")
    async with asyncio.TaskGroup() as tg:
        said = tg.create_task(say(link, b"held"))
        done, _ = await asyncio.wait([said], timeout=0.1)
        assert not done
        await link.set("open")

    assert said.result() == b"held"


async def test_refused_connections_are_refused_until_it_opens(link: Link) -> None:
    """Nothing listens, then the same port does."""
    await link.set("refuse")
    with pytest.raises(ConnectionRefusedError):
        await say(link, b"x")
    await link.set("open")

    assert await say(link, b"x") == b"x"


async def test_open_connections_are_reset(link: Link) -> None:
    """Not ended in order: the reader sees a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(b"x")
    assert await reader.read(1) == b"x"
    link.reset()

    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    writer.transport.abort()
