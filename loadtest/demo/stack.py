"""The processes of one run: three fresh replicas and a router in front of them.

Fresh processes for every policy: cold caches, an empty index, nothing learned.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct

import loadtest
from loadtest.demo.children import Child, ChildDied, running
from loadtest.demo.workload import NUM_REPLICAS, Workload

_START_TIMEOUT_S: Final = 60.0
_READY_PAUSE_S: Final = 0.05
_REPLICA_UP: Final = re.compile(r"emulating .* at (http://[\d.]+:\d+)")
_ROUTER_UP: Final = re.compile(r"listens on (http://\S+) \(admin: (http://\S+)\)")
_ROOT: Final = Path(loadtest.__file__).parent.parent
_WARM_UP: Final[dict[str, Any]] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
}


class Stack(Struct, frozen=True, kw_only=True):
    """What runs: base URLs and processes; replica i is `r{i + 1}` to the router."""

    router_url: str
    admin_url: str
    replica_urls: tuple[str, ...]
    replicas: tuple[Child, ...]
    router: Child


@asynccontextmanager
async def start(
    workload: Workload, num_gpu_blocks: int, policy: str, log_dir: Path, *, port: int = 0
) -> AsyncIterator[Stack]:
    """Run replicas and router, ready for requests, for as long as the context lasts.

    Args:
        log_dir: Exists; gets one log per process.
        port: The router's; 0: any free one.

    Raises:
        ChildDied: one of them did not start.
    """
    env = child_environment(os.environ)
    emulate = ["-m", "loadtest.emulator", *workload.replica_flags(num_gpu_blocks)]
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                running(f"replica r{i + 1}", emulate, log=log_dir / f"r{i + 1}.log", env=env)
            )
            for i in range(NUM_REPLICAS)
        ]
        for replica in replicas:
            await replica.wait_announced(_REPLICA_UP, _START_TIMEOUT_S)
        urls = tuple(replica.announced[1] for replica in replicas)
        serve = ["-m", "router.cli", "serve", "--policy", policy]
        serve += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", "0"]
        for url in urls:
            serve += ["--replica", url]
        router = await stack.enter_async_context(
            running("router", serve, log=log_dir / "router.log", env=env)
        )
        await router.wait_announced(_ROUTER_UP, _START_TIMEOUT_S)
        await _warm_up(router, router.announced[1], urls)
        yield Stack(
            router_url=router.announced[1],
            admin_url=router.announced[2],
            replica_urls=urls,
            replicas=tuple(replicas),
            router=router,
        )


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give children this very source tree, and no configuration that nobody chose here."""
    env = {key: value for key, value in environ.items() if not key.startswith("WARMROUTE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environ.get("PYTHONPATH"))))
    env["PYTHONUNBUFFERED"] = "1"
    return env


async def _warm_up(router: Child, router_url: str, replica_urls: tuple[str, ...]) -> None:
    """Wait until the router is ready, then let everybody answer one short request.

    Raises:
        ChildDied: it does not become ready, or a request fails.
    """
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _START_TIMEOUT_S
        while (response := await client.get(f"{router_url}/readyz")).status_code != 200:
            if loop.time() > deadline_s:
                raise ChildDied(f"router was not ready: {response.text.strip()} ({router.log})")
            await asyncio.sleep(_READY_PAUSE_S)
        for url in (*replica_urls, router_url):
            response = await client.post(f"{url}/v1/chat/completions", json=_WARM_UP)
            if response.status_code != 200:
                raise ChildDied(f"{url} answered {response.status_code}: {response.text[:500]}")
