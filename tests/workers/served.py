"""`warmroute serve --workers N` as processes of its own, and what can be seen of them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from click.testing import Result

from loadtest.emulator.emulator import Emulator
from router.base.contracts import block_key
from router.config.worker import of_socket, unpacked
from tests import forks
from tests.cli.running import run, serving
from tests.faults.stage import SESSION, Reply, chat, words
from tests.waiting import PATIENCE_S, until

Json = dict[str, Any]

LISTENS = re.compile(r"warmroute listens on (http://\S+) \(admin: (http://\S+)\), 2 workers")
SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")


def command_of(pid: int) -> Any:
    """Return the process that a started one stands for: its fork, or itself (see tests.forks)."""
    name, _, fork = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
    return psutil.Process(int(fork) if name == "fork" else pid)


class Served:
    """A parent and its workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = self.admin_url = ""
        self.lines: list[str] = []  # of its log, and of its workers'

    async def read(self) -> None:
        """Read what is written to stderr, until it ends."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode().rstrip())
            if (found := LISTENS.match(self.lines[-1])) is not None:
                self.url, self.admin_url = found.groups()

    # -- processes ---------------------------------------------------------------------------

    @property
    def parent(self) -> Any:
        """Return the process of the parent."""
        return command_of(self.process.pid)

    def workers(self) -> dict[int, Any]:
        """Return the processes of the workers by number."""
        found = {}
        for child in self.parent.children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                arguments = child.cmdline()
                if "--worker" in arguments:
                    found[unpacked(arguments[arguments.index("--worker") + 1]).number] = child
        return found

    def pid_of(self, number: int) -> int | None:
        """Return the number of a worker's process; None: it is not started yet."""
        worker = self.workers().get(number)
        return worker.pid if worker is not None else None

    @property
    def redis(self) -> Any:
        """Return the process of the private Redis."""
        return next(each for each in self.parent.children() if "redis" in each.name())

    def kill_worker(self, number: int) -> None:
        forks.kill(self.workers()[number])

    def has_ended(self, process: Any) -> bool:
        """Return whether a process is gone, or waits for whoever should look at how it ended."""
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def worker_of(self, port: int) -> int:
        """Find the worker that has the connection from a local port of ours."""
        for number, started in self.workers().items():
            wires = command_of(started.pid).net_connections()
            if any(wire.raddr and wire.raddr.port == port for wire in wires):
                return number
        raise AssertionError(f"no worker has the connection of {port}")

    def said(self, *words: str) -> int:
        """Count the log lines with all of some words."""
        return sum(all(word in line for word in words) for line in self.lines)

    # -- asking ------------------------------------------------------------------------------

    async def ask(self, body: Json | None = None, session: str = SESSION) -> Reply:
        """Send a chat on a connection of its own, so that any worker may answer."""
        sent = body if body is not None else chat(words(1))
        headers = {"X-Session-ID": session}
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession() as client,
            client.post(f"{self.url}/v1/chat/completions", json=sent, headers=headers) as answer,
        ):
            return Reply(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, *, admin: bool = True) -> Any:
        """Ask the admin port, or the public one; return the JSON, or the text."""
        base = self.admin_url if admin else self.url
        async with aiohttp.ClientSession() as client, client.get(base + path) as answer:
            assert answer.status == 200, await answer.text()
            is_json = answer.content_type == "application/json"
            return await answer.json() if is_json else await answer.text()

    def sockets(self) -> list[Path]:
        """List what is in the folder of the workers' sockets."""
        return list(Path(self.redis.cwd()).iterdir())

    async def policy_of(self, number: int) -> str:
        """Read the policy in force at one worker, as the other workers ask it."""
        for file in self.sockets():
            if (found := of_socket(file)) is not None and found[1] == number:
                async with (
                    aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(file))) as client,
                    client.get("http://localhost/admin/config") as answer,
                ):
                    return str((await answer.json())["policy"]["name"])
        return "it accepts no requests yet"

    async def post(self, path: str, body: Json) -> int:
        """Send an order to the admin port; return the status."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.admin_url + path, json=body) as answer,
        ):
            return answer.status

    async def beside(self, *args: str) -> Result:
        """Run a command that asks the admin port."""
        return await asyncio.to_thread(run, *args, "--admin", self.admin_url)

    async def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Sum a metric by worker."""
        found: Counter[str] = Counter()
        for sample, text, value in SAMPLE.findall(await self.get("/metrics", admin=False)):
            given = dict(re.findall(r'(\w+)="([^"]*)"', text))
            if sample == name and labels.items() <= given.items():
                found[given["worker"]] += float(value)  # type: ignore[assignment]
        return dict(found)

    # -- waiting -----------------------------------------------------------------------------

    async def until_all(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value at both workers."""

        async def is_so() -> bool:
            return await self.metric(name, **labels) == {"1": value, "2": value}

        await until(is_so)

    async def know(self, *engines: Emulator) -> None:
        """Wait until both workers know as many blocks as the engines have, and no claims."""
        ranks = [rank for engine in engines for rank in engine.replica.ranks]
        keys = [{block_key(d) for d in rank.engine.blocks.cached_keys()} for rank in ranks]
        await self.until_all("warmroute_inflight_requests", 0.0)
        await self.until_all("warmroute_index_blocks", sum(map(len, keys)), tier="gpu")

    async def together(self) -> None:
        """Wait until both workers share their state."""
        await self.until_all("warmroute_worker_up", 1.0)
        await self.until_all("warmroute_redis_up", 1.0)
        await self.until_all("warmroute_routers", 2.0)


@asynccontextmanager
async def serving_workers(*engines: Emulator, args: tuple[str, ...] = ()) -> AsyncIterator[Served]:
    """Serve with two workers in front of engines; ready when both know all engines."""
    replicas = [part for engine in engines for part in ("--replica", engine.url)]
    ports = ("--port", "0", "--admin-port", "0")
    options = ("--workers", "2", "--tokens-prove-ratio", "0", "--tokens-encoder", "tokenizers")
    async with serving(*ports, *options, *replicas, *args) as process:
        served = Served(process)
        async with asyncio.TaskGroup() as tg:
            reading = tg.create_task(served.read())
            try:
                await until(lambda: served.url or process.returncode is not None)
                assert served.url, "\n".join(served.lines)
                await served.until_all("warmroute_replica_healthy", float(len(engines)))
                await served.together()
                yield served
            except BaseException:
                print("\n".join(served.lines[-60:]))
                raise
            finally:
                if process.returncode is None:
                    process.terminate()
                    await until(lambda: process.returncode is not None)
                await reading
