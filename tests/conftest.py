"""What tests of several rooms share: a server for one handler, and real Redis servers."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx._transports.default as httpx_transport
import pytest
import redis.utils
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, settings

from tests.effort import examples
from tests.forks import ForkServer, forked_children
from tests.redis_servers import namespace, shared_redis, start_redis
from tests.startup import sitecustomize

__all__ = ["forked_children", "namespace", "serve", "shared_redis", "start_redis"]

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would spin beside the other workers
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all of it anew
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (os.path.dirname(sitecustomize.__file__), os.environ.get("PYTHONPATH")))
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start gets Ctrl-C

# A context for each client, and each `httpx.get` is one, would read all authorities: 30 ms.
httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)  # type: ignore[attr-defined]

# Each connection asks what version of redis-py is installed: 3 ms.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)  # type: ignore[attr-defined]

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

FORKS = pytest.StashKey[ForkServer]()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server where the workers are started."""
    if not hasattr(config, "workerinput"):
        config.stash[FORKS] = ForkServer()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it."""
    if FORKS in config.stash:
        config.stash[FORKS].close()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without the garbage collector, which then leaves them alone.

    A full collection would look at all that was imported and collected: 0.3 s each time.
    """
    gc.disable()
    try:
        _import_a_share(session.config)
        yield
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)  # as the router's own (router/base/event_loop.py)
        gc.enable()


def _import_a_share(config: pytest.Config) -> None:
    """Import, of all tests, those that fall to this worker, before it imports them all.

    Where no compiled code is kept, after a checkout, each worker would compile everything: 17 s.
    """
    is_all = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if not is_all or not hasattr(config, "workerinput"):
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    files = sorted((config.rootpath / "tests").rglob("test_*.py"))
    for file in files[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        if not name.startswith("tests.engines."):
            with suppress(Exception, pytest.skip.Exception):  # collecting it says what is wrong
                importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread files with slow tests over the first two thirds of the files.

    A slow test has a deadline of its own. So slow tests do not compete for the processor, and the
    last one does not run alone.
    """
    files: dict[Path, list[pytest.Item]] = {}
    slow: set[Path] = set()
    for item in items:
        files.setdefault(item.path, []).append(item)
        if item.get_closest_marker("timeout"):
            slow.add(item.path)
    if hasattr(config, "workerinput") and slow:
        order = [path for path in files if path not in slow]
        step = len(order) * 2 // 3 // len(slow)
        for number, path in enumerate(path for path in files if path in slow):
            order.insert(number * (step + 1), path)
        items[:] = [item for path in order for item in files[path]]


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
