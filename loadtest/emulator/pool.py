"""An emulated Mooncake pool, and its master's HTTP routes.

The routes and their answers are those of the real master, see router/pool/master.py. Engines ask
the real one over RPC; here they use `/emulator/...`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from loadtest.engine_model.pool import BlockPool
from router.base.addresses import own_url_host
from router.base.listening import BACKLOG, listen

PoolFault = Literal["none", "hang", "garbage", "error", "half"]


class EmulatedPool(BlockPool):
    """Objects of one size each.

    Args:
        capacity_bytes: Beyond it objects are evicted without a notice.
        bytes_per_object: Size of every object.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 30, bytes_per_object: int = 16_384) -> None:
        super().__init__(capacity_bytes // bytes_per_object)
        self.capacity_bytes = capacity_bytes
        self.bytes_per_object = bytes_per_object
        self.on_disk: set[str] = set()  # and not in memory; they can be fetched all the same

    def restart(self) -> None:
        """Restart as a master does that was killed: it is empty, counters are zero."""
        self.clear()
        self.num_evicted = self.num_put = 0


class PoolMaster:
    """The master's HTTP server: `async with PoolMaster(pool) as master: ... master.url`.

    `ha_status` is the role it reports: only a master that is `serving` knows objects.
    `fault` applies to all questions from now on. `num_asked` counts questions by path. `stop` and
    `start` use the same port.
    """

    def __init__(
        self, pool: EmulatedPool | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.pool = EmulatedPool() if pool is None else pool
        self.host = host
        self.port = port
        self.fault: PoolFault = "none"
        self.ha_status = "serving"
        self.num_asked: dict[str, int] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{own_url_host(self.host)}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1,
            max_line_size=1 << 22, max_field_size=1 << 22,
        )  # fmt: skip
        await self._runner.setup()
        for one in listen(self.host, self.port):
            await web.SockSite(self._runner, one, backlog=BACKLOG).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening, and cut open connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.num_asked[path] = self.num_asked.get(path, 0) + 1
        if path.startswith("/emulator/"):
            return await self._serve_engine(request)
        match self.fault:
            case "hang":
                await asyncio.Event().wait()
            case "garbage":
                return web.Response(text="<html><body>It works!</body></html>")
            case "error":
                return web.Response(status=500, text="Failed to get all keys")
            case "half":
                return await _half(request, self._text(request))
        if self.ha_status != "serving" and path in _ABOUT_OBJECTS:
            return web.Response(status=503, text=_STANDBY, content_type="application/json")
        return web.Response(text=self._text(request))

    def _text(self, request: web.Request) -> str:
        pool = self.pool if self.ha_status == "serving" else EmulatedPool()
        match request.path:
            case "/health":
                return '{"status":"ok"}'  # of mooncake_master 0.3.13, which says more
            case "/ha_status":
                return self.ha_status
            case "/get_all_keys":
                return "".join(f"{key}\n" for key in pool.keys())
            case "/batch_query_keys":
                keys = request.query.get("keys", "").split(",")
                found = zip(keys, pool.holds(keys), strict=True)
                data = {
                    key: {"ok": ok, "error": None if ok else _NOT_FOUND, "values": [{}]}
                    | (_ON_DISK if key in pool.on_disk else {})
                    for key, ok in found
                }
                return orjson.dumps({"success": True, "data": data}).decode()
            case "/get_all_segments":
                return "127.0.0.1:12345\n"
            case "/metrics":
                return _METRICS.format(
                    num_keys=len(pool),
                    allocated=len(pool) * pool.bytes_per_object,
                    capacity=pool.capacity_bytes,
                    num_evicted=pool.num_evicted,
                    num_put=pool.num_put,
                )
        raise web.HTTPNotFound

    async def _serve_engine(self, request: web.Request) -> web.Response:
        keys: list[str] = orjson.loads(await request.read())
        answer: Any
        if request.path == "/emulator/leading":
            answer = self.pool.leading(keys)
        elif request.path == "/emulator/put":
            answer = self.pool.put(keys)
        elif request.path == "/emulator/remove_all":
            self.pool.clear()
            answer = None
        else:
            raise web.HTTPNotFound
        return web.Response(body=orjson.dumps(answer), content_type="application/json")


_ON_DISK: Any = {"values": [], "local_disk_values": [{"client_id": "1-2", "object_size": 1}]}
_NOT_FOUND = "OBJECT_NOT_FOUND"
_ABOUT_OBJECTS = frozenset({"/get_all_keys", "/batch_query_keys", "/get_all_segments"})
_STANDBY = '{"success":false,"error":"service plane is not active"}'
_METRICS = """# TYPE master_allocated_bytes gauge
master_allocated_bytes {allocated}
# TYPE master_total_capacity_bytes gauge
master_total_capacity_bytes {capacity}
# TYPE master_key_count gauge
master_key_count {num_keys}
# TYPE master_batch_put_start_items_total counter
master_batch_put_start_items_total {num_put}
# TYPE master_evicted_key_count counter
master_evicted_key_count {num_evicted}
"""


async def _half(request: web.Request, text: str) -> web.StreamResponse:
    """Break off in the middle."""
    response = web.StreamResponse(headers={"Content-Length": str(len(text) + 1)})
    await response.prepare(request)
    await response.write(text[: len(text) // 2].encode())
    if request.transport is not None:
        request.transport.abort()
    return response
