"""What tests of several rooms share: a server for one handler, and real Redis servers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, settings

from tests.effort import examples
from tests.redis_servers import namespace, shared_redis, start_redis
from tests.startup import sitecustomize

__all__ = ["namespace", "serve", "shared_redis", "start_redis"]

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would spin beside the other workers
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all of it anew
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (os.path.dirname(sitecustomize.__file__), os.environ.get("PYTHONPATH")))
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start gets Ctrl-C

# No deadline an example: several workers share the processors, so a wall clock shows nothing of the
# code. What has to be quick is measured in processor time (test_body_fields.py).
# How long an example takes to draw says how busy the machine is.
settings.register_profile(
    "suite",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what has a deadline of its own or uses the compose stack.

    In a run of all, slow tests are spread over the first two thirds: neither do several of them
    fight for the processor, nor does the last of them run alone.
    """
    fast, slow = [], []
    for item in items:
        if item.get_closest_marker("timeout") or "stack" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            slow.append(item)
        else:
            fast.append(item)
    if hasattr(config, "workerinput") and slow:
        step = len(fast) * 2 // 3 // len(slow)
        for number, item in enumerate(slow):
            fast.insert(number * (step + 1), item)
        items[:] = fast


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
