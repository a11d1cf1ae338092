"""Several routers behind one port (`--share-port`): real processes, a real Redis, real signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from tests.cli.running import run, serving
from tests.faults.stage import SLOW, Engines, chat, streamed, words
from tests.ports import free_port
from tests.redis_servers import RedisServer, Start
from tests.waiting import until

LISTENS = re.compile(r"warmroute listens on (http://\S+) \(admin: (http://\S+)\)")


class Process:
    """One of the routers, as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.url = self.admin_url = ""
        self.lines: list[str] = []  # of its log

    async def read(self) -> None:
        """Read its log to the end."""
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self.lines.append(line.decode().rstrip())
            if (found := LISTENS.match(self.lines[-1])) is not None:
                self.url, self.admin_url = found.groups()

    @property
    def is_listening(self) -> bool:
        return bool(self.url)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def signal(self, number: int) -> None:
        """Send a signal to the router itself: the process that we started may stand for a fork."""
        pid = self._process.pid
        name, _, fork = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
        os.kill(int(fork) if name == "fork" else pid, number)

    async def ended(self) -> int:
        """Wait for its end; return its exit status."""
        await until(lambda: self.has_ended)
        assert self._process.returncode is not None
        return self._process.returncode

    async def end(self, reading: asyncio.Task[None]) -> None:
        """Kill it if it runs, and wait for the end of its log."""
        if not self.has_ended:
            self.signal(signal.SIGKILL)
        await reading

    async def metric(self, name: str) -> float:
        """Sum a metric of its admin port."""
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{self.admin_url}/admin/metrics") as answer,
        ):
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
        return sum(map(float, found))

    async def num_answered(self) -> float:
        return await self.metric("warmroute_requests_total")

    async def status(self) -> str:
        """Run `warmroute status` beside it."""
        return (await asyncio.to_thread(run, "status", "--admin", self.admin_url)).output


class Port:
    """The port that they share."""

    def __init__(
        self,
        stack: AsyncExitStack,
        readers: asyncio.TaskGroup,
        redis: RedisServer,
        *engines: Emulator,
    ) -> None:
        self._stack = stack
        self._readers = readers
        self._number = free_port()
        self.url = f"http://127.0.0.1:{self._number}"
        self._args = (
            *("--share-port", "--port", str(self._number), "--redis", redis.url),
            *("--set", "tokens.prove_ratio=0", "--set", "tokens.encoder=tokenizers"),
            *(part for engine in engines for part in ("--replica", engine.url)),
        )

    async def join(self) -> Process:
        """Start another router, and wait until it takes connections."""
        admin_port = ("--admin-port", str(free_port()))
        started = Process(await self._stack.enter_async_context(serving(*self._args, *admin_port)))
        reading = self._readers.create_task(started.read())
        self._stack.push_async_callback(started.end, reading)
        await until(lambda: started.is_listening or started.has_ended)
        assert started.is_listening, started.lines
        return started

    async def ask(self, number: int) -> int:
        """Send a chat on a connection of its own, so that any router may answer; return status."""
        connector = aiohttp.TCPConnector(force_close=True)
        body = chat(words(number), max_tokens=2)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.post(f"{self.url}/v1/chat/completions", json=body) as answer,
        ):
            await answer.read()
            return answer.status

    @asynccontextmanager
    async def under_load(self, num_agents: int = 4) -> AsyncIterator[Counter[object]]:
        """Ask all the time; yield how often each status, or kind of failure, was had."""
        outcomes: Counter[object] = Counter()
        is_over = asyncio.Event()

        async def agent(number: int) -> None:
            while not is_over.is_set():
                number += num_agents
                try:
                    outcomes[await self.ask(number)] += 1
                except aiohttp.ClientError:
                    outcomes["cut"] += 1

        async with asyncio.TaskGroup() as tg:
            for number in range(num_agents):
                tg.create_task(agent(number))
            yield outcomes
            is_over.set()


@asynccontextmanager
async def shared_port(
    start_redis: Start, num_engines: int = 1, **options: object
) -> AsyncIterator[Port]:
    async with (
        Engines(num_engines, **options) as engines,
        asyncio.TaskGroup() as readers,
        AsyncExitStack() as stack,
    ):
        yield Port(stack, readers, start_redis(), *engines)


async def test_routers_join_and_leave_under_load_without_a_failed_request(
    start_redis: Start,
) -> None:
    """Each says that it is one of several. SIGTERM twice, as a service manager may send it."""
    async with shared_port(start_redis) as port:
        first = await port.join()
        async with port.under_load() as outcomes:
            second = await port.join()

            async def both_answer() -> bool:
                return await first.num_answered() > 0 and await second.num_answered() > 5

            async def know_each_other() -> bool:
                return await first.metric("warmroute_routers") == 2

            await until(both_answer)
            await until(know_each_other)
            assert "one of 2 routers" in await first.status()

            async with aiohttp.ClientSession() as client:
                answer = await client.get(f"{port.url}/metrics")
                said = await answer.text()
                assert answer.status == 404
                places = [each.admin_url.removeprefix("http://") for each in (first, second)]
                assert any(f"/admin/metrics at {place}" in said for place in places)

            first.signal(signal.SIGTERM)
            first.signal(signal.SIGTERM)
            assert await first.ended() == 0
            num_before = sum(outcomes.values())
            await until(lambda: sum(outcomes.values()) > num_before + 20)

            async def is_alone() -> bool:
                return "one of" not in await second.status()

            await until(is_alone)

    assert set(outcomes) == {200}


async def test_a_killed_router_takes_only_its_own_requests_with_it(start_redis: Start) -> None:
    async with (
        shared_port(start_redis, 2, time_model=SLOW, reply_tokens=100) as port,
        AsyncExitStack() as stack,
    ):
        routers = [await port.join(), await port.join()]
        answers: list[aiohttp.ClientResponse] = []

        async def open_streams() -> list[float]:
            """Open another stream; return how many each router has in flight."""
            client = await stack.enter_async_context(aiohttp.ClientSession())
            body = streamed(chat(words(len(answers)), max_tokens=100))
            asking = client.post(f"{port.url}/v1/chat/completions", json=body)
            answers.append(await stack.enter_async_context(asking))
            return [await each.num_answered() for each in routers]

        async def both_have_some() -> bool:
            return len(answers) > 8 or len(await open_streams()) > 1

        await until(both_have_some)
        while len(answers) < 8:
            await open_streams()
        routers[0].signal(signal.SIGKILL)

        ends: Counter[bool] = Counter()
        for answer in answers:
            with suppress(aiohttp.ClientError):
                ends[(await answer.read()).endswith(b"data: [DONE]\n\n")] += 1
        assert ends[True] > 0
        assert ends[False] == 0
        assert {await port.ask(1_000 + number) for number in range(4)} == {200}

        async def nothing_is_left() -> bool:
            return await routers[1].metric("warmroute_inflight_requests") == 0

        await until(nothing_is_left)  # what the dead one had in flight counts no longer


async def test_a_hung_router_is_silent_to_the_watchdog_and_leaves_the_port_when_killed(
    start_redis: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test is the service manager: it kills a router whose pings end."""
    async with shared_port(start_redis) as port:
        other = await port.join()
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)

        async def told() -> str:
            loop = asyncio.get_running_loop()
            return (await loop.sock_recv(manager, 100)).decode()

        hung = await port.join()
        async with asyncio.timeout(60):
            while await told() != "READY=1":
                pass
            while await told() != "WATCHDOG=1":
                pass
        hung.signal(signal.SIGSTOP)
        with suppress(TimeoutError):  # what it had sent before comes to an end
            while True:
                async with asyncio.timeout(3):
                    await told()
        hung.signal(signal.SIGKILL)
        await hung.ended()
        manager.close()

        assert {await port.ask(number) for number in range(20)} == {200}
        assert await other.num_answered() >= 20


async def test_a_second_router_with_the_same_admin_port_names_the_flag(start_redis: Start) -> None:
    async with shared_port(start_redis) as port:
        first = await port.join()
        taken = first.admin_url.rpartition(":")[2]
        redis = start_redis()
        args = ("--share-port", "--port", "0", "--redis", redis.url, "--admin-port", taken)
        async with serving(*args, "--replica", "http://127.0.0.1:9") as process:
            _, log = await process.communicate()

    assert process.returncode == 2
    assert log.decode().splitlines()[-1] == (
        f"Error: cannot listen on 127.0.0.1:{taken}: Address already in use; each router needs "
        "an admin port of its own (--admin-port PORT)"
    )
