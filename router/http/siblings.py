"""The workers of one `serve --workers`: each asks the others' admin API over a socket.

Clients see one port and operators see one admin port: the kernel gives a connection to any worker.
So each worker answers the admin port for all of them:

    one      the worker that has run for longest answers. What it answers is shared through Redis
             (replicas, sessions, turns, pools, experiments), or the same everywhere (the page, the
             configuration), and orders reach the others through Redis. An order to
             engines must be sent once. This is every route that is not in the next row.
    merged   each worker answers, and the answers are merged, because they count a worker's own
             requests: `/admin/metrics` here; state, live feed and findings are merged by
             their observers (`ObserverPart.merged`).

A reload is a signal; the parent passes it on to all. The sockets are in a folder that only this
user can read, so they ask for no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from router.base.errors import NoWorker
from router.config.worker import Worker, of_socket
from router.http.admin import AdminApp
from router.http.admin_pages import AdminPages, Handler
from router.http.answers import METRICS_HEADERS
from router.http.merged_metrics import merged_metrics

METRICS: Final = "/admin/metrics"
_GATHER_S: Final = 2.0  # a worker that is silent for longer is left out
_CONNECT_S: Final = 2.0
_SILENCE_S: Final = 90.0  # an order to engines takes up to a minute
_SHUTDOWN_S: Final = 0.1
_READ: Final = ("GET", "HEAD")
_PASSED: Final = ("Content-Type", "Accept")
_NOT_PASSED: Final = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)


class Sibling(NamedTuple):
    """A worker that accepts requests, perhaps this one itself."""

    start: int
    number: int
    socket: str


class Siblings:
    """All workers of the same parent."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def found(self) -> list[Sibling]:
        """List the workers that accept requests, the one that has run for longest first."""
        folder = self.worker.folder
        named = [(of_socket(file), file) for file in folder.iterdir()]
        return sorted(Sibling(*of, str(file)) for of, file in named if of is not None)

    @asynccontextmanager
    async def listening(self, app: AdminApp) -> AsyncIterator[None]:
        """Answer the other workers within the block."""
        runner = web.AppRunner(
            app.build(), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, access_log=None
        )
        await runner.setup()
        try:
            await web.UnixSite(runner, str(self.worker.socket)).start()
            yield
        finally:
            self.worker.socket.unlink(missing_ok=True)
            await runner.cleanup()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to the worker that has run for longest.

        Raises:
            NoWorker: none answers.
        """
        body = await request.read()
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        url = _url(request.raw_path)
        for each in self.found():
            try:
                async with (
                    _client(each, silence_s=_SILENCE_S) as client,
                    client.request(request.method, url, data=body, headers=headers) as answer,
                ):
                    passed = [
                        (name, value)
                        for name, value in answer.headers.items()
                        if name.lower() not in _NOT_PASSED
                    ]
                    content = await answer.read()
                    return web.Response(status=answer.status, body=content, headers=passed)
            except aiohttp.ClientConnectorError:
                continue  # it has just ended
            except (aiohttp.ClientError, TimeoutError) as exc:
                if request.method not in _READ:
                    raise NoWorker(
                        f"worker {each.number} ended during this order; look whether it is in force"
                    ) from exc
        raise self.none_answers()

    def none_answers(self) -> NoWorker:
        """Return what to raise if no worker answers."""
        return NoWorker("no worker accepts requests; try again in a moment")

    async def gather(self, path: str) -> dict[int, bytes]:
        """Ask every worker at once; return what those say that answer 200, by their numbers.

        The one that has run for longest is first.
        """
        found = self.found()
        answers = await asyncio.gather(*(self._ask(each, path) for each in found))
        pairs = zip(found, answers, strict=True)
        return {each.number: body for each, body in pairs if body is not None}

    async def _ask(self, sibling: Sibling, path: str) -> bytes | None:
        try:
            async with (
                asyncio.timeout(_GATHER_S),
                _client(sibling) as client,
                client.get(_url(path)) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def follow(
        self, sibling: Sibling, path: str, take: Callable[[int, bytes], Awaitable[None]]
    ) -> None:
        """Call `take` with each line of a feed and its worker's number; ends with the worker."""
        with suppress(aiohttp.ClientError):
            async with _client(sibling) as client, client.get(_url(path)) as answer:
                while answer.status == 200 and (line := await answer.content.readline()):
                    await take(sibling.number, line)

    async def metrics_page(self, request: web.BaseRequest | None = None) -> web.Response:
        """Answer the metrics of all workers."""
        page = merged_metrics(await self.gather(METRICS), self.worker.total)
        return web.Response(body=page, headers=METRICS_HEADERS)


class OverWorkers:
    """The pages of the admin port where there are several workers.

    Args:
        pages: Of one worker.
        merged: Routes of these that are answered by all.
    """

    def __init__(
        self, pages: Sequence[AdminPages], siblings: Siblings, merged: Mapping[str, Handler]
    ) -> None:
        self._pages = pages
        self._siblings = siblings
        self._merged = {f"GET {METRICS}": siblings.metrics_page, **merged}

    def routes(self) -> Mapping[str, Handler]:
        return {
            route: self._merged.get(route, self._siblings.forward)
            for pages in self._pages
            for route in pages.routes()
        }


def _url(path: str) -> URL:
    return URL(f"http://localhost{path}", encoded=True)


def _client(sibling: Sibling, *, silence_s: float | None = None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(sibling.socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, connect=_CONNECT_S, sock_read=silence_s
        ),
        auto_decompress=False,
        read_bufsize=1 << 20,
    )
