"""A server that is to a router what a test says it is: for what the emulator has no switch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web
from msgspec import Struct
from multidict import CIMultiDict

from loadtest.tiny_model import MODEL_DIR

_ABSENT = ("/version", "/metrics", "/kv_event_sources", "/is_paused", "/tokenize")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "root": str(MODEL_DIR)}]}


class Received(Struct):
    """A request as it arrived: `target` is path and query, raw."""

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes


class FakeEngine:
    """Answers `/v1/models` and `/health`; `pages` adds or replaces, `on_request` does the rest.

    A page is a JSON value, or (status, text). Requests for pages are not recorded.
    """

    def __init__(self, on_request: Handler | None = None, **pages: Any) -> None:
        self.pages: dict[str, Any] = {"/v1/models": MODELS, "/health": (200, "")}
        self.pages |= {"/" + name: page for name, page in pages.items()}
        self.received: list[Received] = []
        self.pages_read: Counter[str] = Counter()  # how often each was asked for
        self.on_request = on_request or _ok
        self.hangs = False
        self.hanging: set[str] = set()  # paths that are never answered
        self.tokenizes = False  # `on_request` answers /tokenize, too
        self.reached = asyncio.Event()
        self.left = asyncio.Event()  # a request's client went away
        self.url = ""
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(
            app, auto_decompress=False, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def die(self) -> None:
        """End all connections, and listen no more."""
        await self._runner.cleanup()

    async def listen(self) -> None:
        """Listen on a free port, or again on the old one."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.hangs or request.path in self.hanging:
            await self._for_ever()
        page = self.pages.get(request.path)
        if page is not None:
            self.pages_read[request.path] += 1
            if isinstance(page, tuple):
                return web.Response(status=page[0], text=page[1])
            return web.json_response(page)
        if request.path in _ABSENT and not (self.tokenizes and request.path == "/tokenize"):
            return web.Response(status=404)
        body = await request.read()
        headers = CIMultiDict(request.headers)
        self.received.append(Received(request.method, request.raw_path, headers, body))
        self.reached.set()
        try:
            return await self.on_request(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _for_ever(self) -> None:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def _ok(_: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "chat.completion", "choices": []})


def streams(
    *parts: bytes, then: str = "end", kind: str = "text/event-stream", pause_s: float = 0.01
) -> Handler:
    """Answer with these parts, and then end the answer, hold it open, or cut the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)
        if then == "hold":
            await asyncio.Event().wait()
        if then == "cut":
            hang_up(request)
        return response

    return answer


def first_then(first: Handler, others: Handler) -> Handler:
    """Answer one request so, wherever it goes, and all others so."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.host)
        return await (first if len(asked) == 1 else others)(request)

    return answer


def hang_up(request: web.Request) -> None:
    """Cut a request's connection."""
    assert request.transport is not None
    request.transport.abort()
