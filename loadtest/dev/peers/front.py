"""One contestant, running in front of replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import psutil
from msgspec import Struct

from loadtest.dev.peers.contestants import Contestant, Place
from loadtest.engines.ports import free_port
from loadtest.runner.children import Child, ChildDied, running
from loadtest.runner.stack import child_environment
from router.config.tls import system_tls

_READY_S: Final = 60.0
_PAUSE_S: Final = 0.1


class Front(Struct, frozen=True, kw_only=True):
    """A router that answers."""

    url: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Read the CPU time of the router and of what it started."""
        times = [p.cpu_times() for p in (self.process, *self.process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))

    def rss_bytes(self) -> int:
        """Read the resident memory of the router and of what it started."""
        processes = (self.process, *self.process.children(recursive=True))
        return int(sum(process.memory_info().rss for process in processes))


@asynccontextmanager
async def in_front(
    contestant: Contestant, urls: Sequence[str], folder: Path, log_dir: Path
) -> AsyncIterator[Front]:
    """Run a contestant in front of the replicas at `urls` for as long as the context lasts.

    Args:
        folder: Where contestants are installed.
        log_dir: Exists; gets its log.

    Raises:
        ChildDied: it did not start.
        httpx.HTTPError: a replica does not answer.
    """
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=system_tls()) as client:
        place = Place(
            port=free_port(),
            metrics_port=free_port(),
            urls=tuple(urls),
            events=tuple([await _events(client, url) for url in urls]),
        )
        env = child_environment(os.environ) | {"XDG_STATE_HOME": str(log_dir)}  # the admin token
        async with running(
            contestant.name,
            contestant.command(place),
            log=log_dir / "router.log",
            env=env,
            python=str(contestant.python(folder)),
        ) as child:
            url = f"http://127.0.0.1:{place.port}"
            await _until_ready(client, child, f"{url}{contestant.ready_path}")
            yield Front(url=url, port=place.port, process=psutil.Process(child.pid))


async def _events(client: httpx.AsyncClient, url: str) -> str:
    """Find where a replica publishes its KV events."""
    sources = (await client.get(f"{url}/kv_event_sources")).json()
    return str(sources["0"]["endpoint"]).replace("*", "127.0.0.1")


async def _until_ready(client: httpx.AsyncClient, child: Child, url: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _READY_S
    while True:
        try:
            if (await client.get(url)).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it does not listen yet
        if loop.time() > deadline_s or not psutil.pid_exists(child.pid):
            raise ChildDied(f"{child.name} was not ready; see {child.log}")
        await asyncio.sleep(_PAUSE_S)
