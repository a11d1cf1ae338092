"""router.check.seen: whether something listens at an address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.check import seen as module
from router.check.seen import reach


async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_a_listening_port_or_an_existing_path_is_open(tmp_path: Path) -> None:
    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await reach(f"tcp://127.0.0.1:{port}", timeout_s=10) == "open"
        assert await reach(f"http://127.0.0.1:{port}/x", timeout_s=10) == "open"
    assert await reach(f"tcp://127.0.0.1:{port}", timeout_s=10) == "refused"
    assert await reach(f"ipc://{tmp_path}", timeout_s=10) == "open"
    assert await reach(f"ipc://{tmp_path}/gone", timeout_s=10) == "refused"


@pytest.mark.parametrize("text", ["tcp://h", "tcp://h:x", "tcp://:1", "h:1", "tcp://[::1"])
async def test_an_invalid_address_is_not_tried(text: str) -> None:
    assert await reach(text, timeout_s=10) == "not an address"


async def test_a_host_that_cannot_be_resolved_is_unknown() -> None:
    assert await reach("tcp://nowhere.invalid:1", timeout_s=10) == "unknown host"


async def test_a_host_that_does_not_answer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no route, or packets are dropped."""

    async def no_way(host: str, port: int) -> None:
        raise OSError(113, "No route to host")

    async def swallow(host: str, port: int) -> None:
        await asyncio.sleep(3600)

    for connect, timeout_s in ((no_way, 10.0), (swallow, 0.01)):
        monkeypatch.setattr(module.asyncio, "open_connection", connect)
        assert await reach("tcp://10.0.0.1:1", timeout_s=timeout_s) == "silent"
