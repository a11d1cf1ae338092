"""A proxy that only passes requests on, by aiohttp's server and client: what these cost alone.

Run as a process: `python -m loadtest.bench.bare_proxy http://127.0.0.1:PORT`; it prints its port.
It reads a body whole, sends it on over a kept connection, and sends the whole answer back, with
the loop and the low-level server that the router has. It knows nothing of tokens, replicas,
limits or clients that leave.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

_HOPS: Final = frozenset({"host", "content-length", "connection", "transfer-encoding"})


async def _serve(upstream: str) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOPS}
            url = upstream + request.raw_path
            async with session.request(request.method, url, data=body, headers=headers) as found:
                passed = {k: v for k, v in found.headers.items() if k.lower() not in _HOPS}
                return web.Response(status=found.status, headers=passed, body=await found.read())

        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
