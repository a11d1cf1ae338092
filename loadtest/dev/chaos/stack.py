"""The processes of a run, and the links between them.

    agents ─▶ router a ─┬─ link ─▶ r1 … r4 (HTTP, events, replay: a link each)
    agents ─▶ router b ─┤          (the same, links of its own)
                        ├─ link ─▶ Redis
                        └────────▶ the pool's master

Every server keeps its ports over all its lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import msgspec
from msgspec import Struct

from loadtest.dev.chaos import surroundings
from loadtest.dev.chaos.link import Link
from loadtest.dev.chaos.plan import REPLICAS, ROUTERS
from loadtest.engines.ports import free_port
from loadtest.runner.children import spawn
from loadtest.runner.stack import child_environment, redis_binary

NUM_GPU_BLOCKS: Final = 600
BODY_BYTES: Final = 1024 * 1024  # the routers' limit
REPLY_SEED: Final = 1
FIRST_BYTE_S: Final = 8.0

_START_S: Final = 60.0
_ASK_S: Final = 5.0
_CACHE_TOKENS: Final = 200_000
_END_S: Final = 30.0
_REPLICA_UP: Final = re.compile(rb"emulating \S+ at http")
_ROUTER_UP: Final = re.compile(rb"listens on http")
_REDIS_UP: Final = re.compile(rb"eady to accept connections")

How = Literal["runs", "killed", "ended", "died"]


class Life(Struct):
    """One process of a server, from start to end, in seconds of the loop's clock."""

    number: int
    start_s: float
    end_s: float | None = None
    how: How = "runs"
    status: int | None = None
    ready_s: float | None = None


class Server:
    """A process on fixed ports that is killed, paused and started again.

    Args:
        up: What it writes into its log when it listens.
        ready_url: Answers 200 once it can serve; None: as soon as it listens.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        up: re.Pattern[bytes],
        env: Mapping[str, str],
        ready_url: str | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.lives: list[Life] = []
        self._argv = argv
        self._up = up
        self._env = env
        self._ready_url = ready_url
        self._process: asyncio.subprocess.Process
        self._begun = asyncio.Event()
        self._ends_by: How | None = None  # None: nothing of ours ends it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def life(self) -> Life:
        return self.lives[-1]

    async def start(self) -> None:
        """Start a new life and wait until it is ready.

        Raises:
            RuntimeError: it ended first, or was not ready in time.
        """
        loop = asyncio.get_running_loop()
        seen = self.log.stat().st_size if self.log.exists() else 0
        life = Life(number=len(self.lives), start_s=loop.time())
        self._ends_by = None
        with self.log.open("ab") as output:
            self._process = await spawn(self._argv, output, self._env)
        self.lives.append(life)
        self._begun.set()
        while not (self._up.search(self._said(seen)) and await self._is_ready()):
            if self._process.returncode is not None or loop.time() > life.start_s + _START_S:
                raise RuntimeError(f"{self.name} did not start; see {self.log}")
            await asyncio.sleep(0.05)
        life.ready_s = loop.time()

    async def _is_ready(self) -> bool:
        """Return whether it can serve: a router that has just been started finds its replicas."""
        if self._ready_url is None:
            return True
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.get(self._ready_url) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def keep(self) -> None:
        """Record every end that was not ours, and start the server again."""
        loop = asyncio.get_running_loop()
        while True:
            process, life = self._process, self.life
            status = await process.wait()
            life.end_s, life.status = loop.time(), status
            life.how = self._ends_by or "died"
            if self._ends_by is None:
                await self.start()
                continue
            self._begun.clear()
            if self.life is life:  # what ended it starts it again, or nothing does
                await self._begun.wait()

    async def kill(self) -> None:
        """End it at once."""
        await self._end(signal.SIGKILL, "killed")

    async def end(self) -> None:
        """Ask it to end; after half a minute it is killed and counts as died."""
        await self._end(signal.SIGTERM, "ended")

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    async def _end(self, number: signal.Signals, how: How) -> None:
        self._ends_by = how
        self._send(number)
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._ends_by = "died"
            self._send(signal.SIGKILL)
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _said(self, start: int) -> bytes:
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read()


class Disk:
    """The file of a router's decision records: a pipe; a disk that hangs is a pipe not read."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # O_RDWR: no writer, no end
        self.go_on()

    def hang(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)

    def go_on(self) -> None:
        asyncio.get_running_loop().add_reader(self._file, self._read)

    def close(self) -> None:
        self.hang()
        os.close(self._file)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 1 << 20)


class Stack:
    """What runs. `links` by router and what it leads to: `links["a-r1"]`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, Server] = {}
        self.http: dict[str, Link] = {}
        self.events: dict[str, tuple[Link, Link]] = {}
        self.redis_links: dict[str, Link] = {}
        self.disks: dict[str, Disk] = {}
        self.urls: dict[str, str] = {}
        self.replica_urls: dict[str, str] = {}
        self.redis_port = 0
        self._env = child_environment(os.environ)

    def routers(self) -> list[Server]:
        return [self.servers[name] for name in ROUTERS]

    def surroundings_of(self, router: str) -> Path:
        return self.folder / f"surroundings-{router}"

    def request_log(self) -> Path:
        return self.folder / "engines.jsonl"

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator[Stack]:
        """Run everything, ready, for as long as the context lasts.

        Raises:
            RuntimeError: one of them did not start.
        """
        made = cls(folder)
        async with AsyncExitStack() as stack:
            await made._start(stack)
            async with asyncio.TaskGroup() as tg:
                keepers = [tg.create_task(server.keep()) for server in made.servers.values()]
                try:
                    yield made
                finally:
                    for keeper in keepers:
                        keeper.cancel()

    async def _start(self, stack: AsyncExitStack) -> None:
        self.redis_port = free_port()
        master_port = free_port()
        self._add("redis", self._redis_argv(), _REDIS_UP)
        pool = ["--serve-pool", str(master_port), "--port", str(free_port()), "--no-events"]
        self._add("pool", self._emulate(pool), _REPLICA_UP)
        master = f"http://127.0.0.1:{master_port}"
        ports = {name: tuple(free_port() for _ in range(3)) for name in REPLICAS}
        for name, (http, events, replay) in ports.items():
            flags = ["--port", str(http), "--events-port", str(events)]
            flags += ["--replay-port", str(replay), "--pool", master]
            flags += ["--request-log", str(self.request_log())]
            self._add(name, self._emulate(flags), _REPLICA_UP)
            self.replica_urls[name] = f"http://127.0.0.1:{http}"
        for router in ROUTERS:
            config = await self._wire(stack, router, ports, master)
            path = self.folder / f"router-{router}.yaml"
            path.write_bytes(msgspec.yaml.encode(config))
            around = str(Path(surroundings.__file__)), str(self.surroundings_of(router))
            serve = [*around, "router.cli"]
            serve += ["serve", "--config", str(path)]
            ready_url = f"{self.urls[router]}/readyz"
            self._add(router, [sys.executable, *serve], _ROUTER_UP, ready_url)
        for server in self.servers.values():
            stack.push_async_callback(_stopped, server)
        first = [self.servers["redis"], self.servers["pool"]]
        for batch in (first, [self.servers[name] for name in REPLICAS], self.routers()):
            async with asyncio.TaskGroup() as tg:
                for server in batch:
                    tg.create_task(server.start())

    def _add(
        self, name: str, argv: Sequence[str], up: re.Pattern[bytes], ready_url: str | None = None
    ) -> None:
        log = self.folder / f"{name}.log"
        self.servers[name] = Server(name, argv, log, up, self._env, ready_url)

    def _emulate(self, flags: Sequence[str]) -> list[str]:
        argv = [sys.executable, "-m", "loadtest.emulator", *flags]
        argv += ["--num-gpu-blocks", str(NUM_GPU_BLOCKS), "--seed", str(REPLY_SEED)]
        # 8 ms a token: an answer takes a fifth of a second, there is time to interfere.
        argv += ["--preset", "instant", "--base-ms", "8", "--ms-per-prefill-token", "0.03"]
        return argv

    def _redis_argv(self) -> list[str]:
        argv = [redis_binary(), "--port", str(self.redis_port), "--save", "", "--bind", "127.0.0.1"]
        return [*argv, "--dir", str(self.folder)]

    async def _wire(
        self,
        stack: AsyncExitStack,
        router: str,
        ports: Mapping[str, tuple[int, ...]],
        master: str,
    ) -> dict[str, Any]:
        """Make a router's links, surroundings and disk; return its configuration."""

        async def link(to_port: int) -> Link:
            return await stack.enter_async_context(Link.running(free_port(), to_port))

        replicas = []
        for name, (http, events, replay) in ports.items():
            way = f"{router}-{name}"
            self.http[way] = await link(http)
            self.events[way] = (await link(events), await link(replay))
            replicas.append(
                {
                    "url": f"http://127.0.0.1:{self.http[way].port}",
                    "name": name,
                    "events": [f"tcp://127.0.0.1:{self.events[way][0].port}"],
                    "replay": [f"tcp://127.0.0.1:{self.events[way][1].port}"],
                }
            )
        self.redis_links[f"{router}-redis"] = await link(self.redis_port)
        records = self.folder / f"records-{router}"
        self.disks[router] = Disk(records)
        stack.callback(self.disks[router].close)
        surroundings.step(self.surroundings_of(router), 0.0)
        port = free_port()
        self.urls[router] = f"http://127.0.0.1:{port}"
        return {
            "replicas": replicas,
            "listen": {"host": "127.0.0.1", "port": port},
            "admin": {"port": free_port(), "open": True},
            # The prompt cache (1.2 MB) fills within a minute, so later growth is a leak.
            "tokens": {"cache_tokens": _CACHE_TOKENS},
            "redis": {
                "url": f"redis://127.0.0.1:{self.redis_links[f'{router}-redis'].port}/0",
                "lease_s": 1.5,
                "timeout_s": 1.0,
            },
            "mooncake": {"master": master},
            "limits": {"body_bytes": BODY_BYTES},
            "forward": {
                "connect_timeout_s": 2.0,
                "first_byte_timeout_s": FIRST_BYTE_S,
                "idle_timeout_s": 6.0,
            },
            "health": {"interval_s": 0.5, "timeout_s": 2.0},
            "log": {"json": True, "decisions": str(records)},
        }


async def _stopped(server: Server) -> None:
    """End a server for good, whatever state it is in."""
    if server.lives and server.life.end_s is None:
        server.resume()
        await server.end()
