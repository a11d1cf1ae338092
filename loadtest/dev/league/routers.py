"""The routers: ours by label, others as their documentation says, from their projects' packages.

Session ids are sent to routers that read them; ours gets none.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from loadtest.dev.league.replicas import Replica
from loadtest.engines.ports import free_port
from loadtest.runner.children import Child, ChildDied, running
from loadtest.runner.stack import child_environment, start_router
from loadtest.simulator.arms import UNLIMITED, arm_of, serve_flags
from router.config.tls import system_tls

Command = Callable[["Place"], Sequence[str]]

SESSION_HEADER: Final = "x-session-id"
_PIP: Final = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
_READY_S: Final = 60.0
_PAUSE_S: Final = 0.1


class Place(Struct, frozen=True, kw_only=True):
    """Where a router listens, and the replicas behind it."""

    port: int
    metrics_port: int
    replicas: tuple[Replica, ...]
    block_size: int
    model: str

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]


class Router(Struct, frozen=True, kw_only=True):
    """One router under one policy.

    Ours have neither package nor command, and may be `unlimited`: before caches that never evict.
    `command` makes what stands behind the interpreter of the environment that has `package`.
    """

    name: str
    package: str | None = None
    command: Command | None = None

    @property
    def is_ours(self) -> bool:
        return self.command is None

    @property
    def is_unlimited(self) -> bool:
        return self.name == UNLIMITED

    def python(self, folder: Path) -> Path:
        """Name the interpreter that has it."""
        return folder / str(self.package) / "bin" / "python"

    def install(self, folder: Path) -> None:
        """Install it into an environment of its own below `folder`, unless it is there.

        Raises:
            subprocess.CalledProcessError: pip failed; it said why.
        """
        python = self.python(folder)
        done = python.parent.parent / ".installed"
        if self.is_ours or done.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        subprocess.run([python, *_PIP, str(self.package)], check=True)
        done.touch()


def _vllm_router(policy: str) -> Router:
    def command(place: Place) -> list[str]:
        line = ["-m", "vllm_router.launch_router", "--worker-urls", *place.urls]
        line += ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "error"]
        line += ["--prometheus-port", str(place.metrics_port), "--policy", policy]
        if policy == "kv_aware":
            for replica in place.replicas:
                line += ["--kv-event-source", f"{replica.url}={replica.events}"]
            line += ["--kv-event-model", place.model]
            line += ["--kv-event-block-size", str(place.block_size)]
        return line

    return Router(name=f"vllm-router:{policy}", package="vllm-router==0.1.17", command=command)


def _tree_router(name: str, package: str, *words: str) -> Router:
    def command(place: Place) -> list[str]:
        line = [*words, "--worker-urls", *place.urls, "--policy", "cache_aware"]
        line += ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "warn"]
        line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
        return line

    return Router(name=name, package=package, command=command)


OTHERS: Final = {
    router.name: router
    for router in (
        _vllm_router("sticky_least_loaded"),
        _vllm_router("consistent_hash"),
        _vllm_router("kv_aware"),
        _tree_router("sglang-router", "sglang-router==0.3.2", "-m", "sglang_router.launch_router"),
        _tree_router("smg", "smg==1.13.0", "-m", "smg.cli", "launch"),
    )
}
DEFAULT: Final = (
    "kv_aware", "kv_aware:queue.mode=off", "least_loaded", "lmetric",
    "vllm-router:sticky_least_loaded", "vllm-router:consistent_hash", UNLIMITED,
)  # fmt: skip


def router_of(name: str) -> Router:
    """Return a router by its name: one of `OTHERS`, or a policy of ours by label.

    Raises:
        ValueError: there is none of this name.
    """
    if name in OTHERS:
        return OTHERS[name]
    arm_of(name)
    return Router(name=name)


class Front(Struct, frozen=True, kw_only=True):
    """A router that answers; ours has an admin port and a file with its token."""

    url: str
    admin_url: str | None = None
    token_file: Path | None = None


@asynccontextmanager
async def in_front(
    router: Router,
    replicas: Sequence[Replica],
    *,
    flags: Sequence[str],
    block_size: int,
    folder: Path,
    log_dir: Path,
) -> AsyncIterator[Front]:
    """Run a fresh router before replicas, as long as the context lasts.

    Args:
        flags: Of ours: the pool behind the replicas.
        folder: Where others are installed.
        log_dir: Exists; gets its log.

    Raises:
        ChildDied: it did not start.
    """
    if router.command is None:
        own = [*serve_flags(arm_of(router.name)), *flags]
        async with start_router([replica.url for replica in replicas], own, log_dir) as ours:
            yield Front(url=ours.url, admin_url=ours.admin_url, token_file=ours.token_file)
        return
    place = Place(
        port=free_port(),
        metrics_port=free_port(),
        replicas=tuple(replicas),
        block_size=block_size,
        model="tiny",
    )
    url = f"http://127.0.0.1:{place.port}"
    async with running(
        router.name,
        router.command(place),
        log=log_dir / "router.log",
        env=child_environment(os.environ),
        python=str(router.python(folder)),
    ) as child:
        await _until_ready(child, f"{url}/v1/models")
        yield Front(url=url)


async def _until_ready(child: Child, url: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _READY_S
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=system_tls()) as client:
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            if loop.time() > deadline_s:
                raise ChildDied(f"{child.name} was not ready; see {child.log}")
            await asyncio.sleep(_PAUSE_S)
