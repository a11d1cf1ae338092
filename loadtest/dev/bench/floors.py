"""Proxies that decide nothing, beside which a router's cost is measured.

    bare     a proxy in bare aiohttp: each request to one server, its answer back
    relay    passes on bytes alone, on uvloop: what the kernel and the loop cost

A line on stdout has the port.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal, cast

import aiohttp
import click
import psutil
import uvloop
from aiohttp import web
from msgspec import Struct

from loadtest.dev.bench.setting import Setting
from loadtest.runner.children import running
from loadtest.runner.stack import child_environment

Kind = Literal["bare", "relay"]

_START_S: Final = 60.0
_LINE: Final = re.compile(r"^(\d+)$", re.MULTILINE)
_MAX_BODY_BYTES: Final = 64 * 1024 * 1024
_OF_ONE_CONNECTION: Final = frozenset({"Host", "Content-Length", "Transfer-Encoding", "Connection"})


class Floor(Struct, frozen=True, kw_only=True):
    """A proxy that runs."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Read the CPU time that it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def floor(kind: Kind, port: int, setting: Setting) -> AsyncIterator[Floor]:
    """Run a proxy in front of a port.

    Raises:
        ChildDied: it does not start.
    """
    argv = ["-m", "loadtest.dev.bench.floors", kind, str(port)]
    env, log = child_environment(os.environ), setting.work_dir / f"{kind}.log"
    async with running(kind, argv, log=log, env=env) as child:
        await child.wait_announced(_LINE, _START_S)
        yield Floor(port=int(child.announced[1]), process=psutil.Process(child.pid))


async def _bare(target_port: int) -> int:
    """Serve as a proxy in bare aiohttp; return the port."""
    session = aiohttp.ClientSession(
        f"http://127.0.0.1:{target_port}",
        connector=aiohttp.TCPConnector(limit=0),
        auto_decompress=False,
    )

    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k not in _OF_ONE_CONNECTION}
        body, target = await request.read(), str(request.rel_url)
        async with session.request(request.method, target, headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k not in _OF_ONE_CONNECTION}
            if answer.content_length is not None:
                whole = await answer.read()
                return web.Response(status=answer.status, headers=kept, body=whole)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


class _Upstream(asyncio.Protocol):
    """The connection to the target."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class _Relayed(asyncio.Protocol):
    """A client's connection, with one to the target of its own."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._early = bytearray()
        self._upstream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        loop = asyncio.get_running_loop()  # a protocol has no task group
        self._connecting = loop.create_task(self._connect(), name="connect")

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(
            lambda: _Upstream(self._client), "127.0.0.1", self._target_port
        )
        self._upstream = made[0]
        self._upstream.write(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early += data
        else:
            self._upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()


async def _relay(target_port: int) -> int:
    """Serve as a relay; return the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Relayed(target_port), "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


_KINDS: Final[dict[str, Callable[[int], Awaitable[int]]]] = {"bare": _bare, "relay": _relay}


async def _serve(kind: str, target_port: int) -> None:
    click.echo(await _KINDS[kind](target_port))
    await asyncio.Event().wait()


@click.command()
@click.argument("kind", type=click.Choice(tuple(_KINDS)))
@click.argument("target_port", type=int)
def main(kind: str, target_port: int) -> None:
    """Serve in front of TARGET_PORT until killed."""
    uvloop.run(_serve(kind, target_port))


if __name__ == "__main__":
    main()
