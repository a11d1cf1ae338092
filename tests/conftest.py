"""What tests of several rooms share: a server for one handler, and real Redis servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.redis_servers import namespace, shared_redis, start_redis

__all__ = ["namespace", "serve", "shared_redis", "start_redis"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve one handler on a free port; gives the base URL."""
    servers: list[TestServer] = []

    async def start(handler: Handler) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()
