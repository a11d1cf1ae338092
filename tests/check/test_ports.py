"""router.check.ports and router.check.running: who listens where, without a word said there."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from router.check import ports
from router.check.ports import reach, why_not_free
from router.check.running import ask_router, total
from tests.conftest import Serve


async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_whoever_listens_is_found(tmp_path: Path) -> None:
    """At a port, or at a path that is there."""
    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await reach(f"tcp://127.0.0.1:{port}", timeout_s=10) == "open"
        assert await reach(f"http://127.0.0.1:{port}/x", timeout_s=10) == "open"
    assert await reach(f"tcp://127.0.0.1:{port}", timeout_s=10) == "refused"
    assert await reach(f"ipc://{tmp_path}", timeout_s=10) == "open"
    assert await reach(f"ipc://{tmp_path}/gone", timeout_s=10) == "refused"


@pytest.mark.parametrize("text", ["tcp://h", "tcp://h:x", "tcp://:1", "h:1", "tcp://[::1"])
async def test_what_is_no_address_is_told(text: str) -> None:
    """Before anything is tried."""
    assert await reach(text, timeout_s=10) == "not an address"


async def test_a_host_that_nobody_knows_is_told() -> None:
    """And one that says nothing is silent."""
    assert await reach("tcp://nowhere.invalid:1", timeout_s=10) == "unknown host"


async def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network without a way there, and of one that swallows packets."""

    async def no_way(host: str, port: int) -> None:
        raise OSError(113, "No route to host")

    async def swallow(host: str, port: int) -> None:
        await asyncio.sleep(3600)

    for connect, timeout_s in ((no_way, 10.0), (swallow, 0.01)):
        monkeypatch.setattr(ports.asyncio, "open_connection", connect)
        assert await reach("tcp://10.0.0.1:1", timeout_s=timeout_s) == "silent"


def test_a_free_port_is_free_and_left_so() -> None:
    """A taken one is not; nobody listens on a host that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not_free("127.0.0.1", port) == "Address already in use"
    assert why_not_free("127.0.0.1", port) is None
    assert why_not_free("127.0.0.1", port) is None
    assert why_not_free("nowhere.invalid", port) == "unknown host"
    assert why_not_free("203.0.113.1", port) is not None
    assert why_not_free("::1", port) in (None, "Cannot assign requested address")


async def test_a_router_is_known_by_its_pages(serve: Serve) -> None:
    """Behind a token, too; others are not taken for one."""
    told = {"/metrics": (200, 'warmroute_x_total{a="b"} 2.0\nwarmroute_x_total 1\n')}

    async def answer(request: web.Request) -> web.Response:
        status, text = told.get(request.path, (401, '{"error": "admin token missing"}'))
        return web.Response(status=status, text=text)

    port = int((await serve(answer)).rpartition(":")[2])
    page = await ask_router("listen", "0.0.0.0", port, timeout_s=10)
    admin = await ask_router("admin", "127.0.0.1", port, timeout_s=10)
    told["/metrics"] = (200, "<html>")
    other = await ask_router("listen", "", port, timeout_s=10)
    nobody = await ask_router("listen", "::", port, timeout_s=10)

    assert page is not None
    assert (total(page, "warmroute_x_total"), total(page, "warmroute_y_total")) == (3, 0)
    assert admin is not None
    assert (other, nobody) == (None, None)
