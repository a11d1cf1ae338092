"""Make and end the planned faults: one context per kind of fault.

A fault is over when its target works again. A killed process, for example, must be ready again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import aiohttp
import orjson
from msgspec import Struct

from loadtest.dev.chaos import surroundings
from loadtest.dev.chaos.link import Link, Mode
from loadtest.dev.chaos.plan import AT_ONCE, REPLICAS, Fault, touches
from loadtest.dev.chaos.stack import Stack
from loadtest.dev.chaos.strays import STRAYS

_ASK_S: Final = 5.0
_STRAYS_S: Final = 0.05
_IDLE_S: Final = 1.0
_SPARE_DESCRIPTORS: Final = 3
_FULL_BYTES: Final = 1_000_000  # less than an empty Redis takes: every write is refused


class Done(Struct, kw_only=True):
    """A fault that was done; `end_s` None: it lasts. Seconds of the loop's clock."""

    fault: Fault
    start_s: float
    end_s: float | None = None
    error: str | None = None  # why it could not be done or undone

    def overlaps(self, start_s: float, end_s: float) -> bool:
        return self.start_s <= end_s and (self.end_s is None or self.end_s >= start_s)


class Injector:
    """Makes the faults of a stack and keeps the time line.

    Args:
        send_large: Sends a router several large bodies at once.
    """

    def __init__(self, stack: Stack, send_large: Callable[[str], Awaitable[None]]) -> None:
        self.time_line: list[Done] = []
        self._stack = stack
        self._send_large = send_large

    def can_do(self, fault: Fault) -> bool:
        """Whether its target is whole; on a slow machine a process may still be starting."""
        lasting = [done.fault for done in self.time_line if done.end_s is None]
        alike = [one for one in lasting if one.kind.group == fault.kind.group]
        return len(alike) < AT_ONCE[fault.kind.group] and not any(
            touches(fault.target, one.target) for one in lasting
        )

    async def do(self, fault: Fault) -> None:
        """Do one fault from its beginning to its end; call `can_do` before."""
        loop = asyncio.get_running_loop()
        done = Done(fault=fault, start_s=loop.time())
        self.time_line.append(done)
        try:
            async with self._doing(fault.kind.name)(fault.target):
                await self._last(fault, loop.time() + fault.duration_s)
        except (OSError, RuntimeError, aiohttp.ClientError, TimeoutError) as exc:
            done.error = repr(exc)  # a process is gone already, say: the next fault goes on
        finally:
            done.end_s = loop.time()

    def _doing(self, name: str) -> Callable[[str], AbstractAsyncContextManager[None]]:
        subject, _, what = name.partition(" ")
        match name:
            case "http gets strays":
                return lambda way: contextlib.nullcontext()
            case "replica killed" | "router killed" | "redis killed" | "pool killed":
                return self._killed
            case "router ended":
                return self._ended
            case "replica paused" | "router paused" | "redis paused" | "pool paused":
                return self._paused
            case "replica answers 500":
                return self._armed({"kind": "status", "probability": 0.7})
            case "replica dies in answers":
                return self._armed({"kind": "die_after", "probability": 0.7, "after_tokens": 3})
            case "replica hangs":
                return self._armed({"kind": "hang", "probability": 0.7})
            case "replica aborts before answers":
                return self._armed({"kind": "abort", "probability": 0.7, "after_tokens": 0})
            case "replica aborts in answers":
                return self._armed({"kind": "abort", "probability": 0.7, "after_tokens": 3})
            case "replica pauses by order":
                return self._ordered("/pause?mode=keep&clear_cache=false", "/resume")
            case "replica sleeps":
                return self._ordered("/sleep?level=1", "/wake_up")
            case "router's names fail":
                return self._names_fail
            case "garbage events":
                return self._armed({"kind": "garbage_events", "count": 6})
            case "events lost":
                return self._armed({"kind": "drop_events", "count": 3})
            case "router's clock stepped":
                return self._clock_stepped
            case "router out of descriptors":
                return self._out_of_descriptors
            case "router's disk hangs":
                return self._disk_hangs
            case "router gets large bodies":
                return self._large_bodies
            case "redis full":
                return self._redis_full
            case "redis emptied":
                return self._redis_emptied
        return self._linked(subject, what)

    def _linked(
        self, subject: str, what: str
    ) -> Callable[[str], AbstractAsyncContextManager[None]]:
        modes: dict[str, Mode] = {
            "held": "hole",
            "refused": "refuse",
            "slow": "slow",
            "drips": "drip",
        }

        @asynccontextmanager
        async def disturbed(way: str) -> AsyncIterator[None]:
            links = self._links(subject, way)
            match what:
                case "reset":
                    for link in links:
                        link.reset()
                    yield
                case "half-closed":
                    for link in links:
                        link.half_close()
                    yield
                case _:
                    for link in links:
                        await link.set(modes[what])
                    try:
                        yield
                    finally:
                        for link in links:
                            await link.set("open")

        return disturbed

    def _links(self, subject: str, way: str) -> list[Link]:
        match subject:
            case "http":
                return [self._stack.http[way]]
            case "events":
                return list(self._stack.events[way])
            case "redis":
                return [self._stack.redis_links[way]]
            case "all":
                return [self._stack.http[way], *self._stack.events[way]]
        raise AssertionError(subject)

    async def _last(self, fault: Fault, until_s: float) -> None:
        """Wait until a fault ends, and repeat what belongs to it meanwhile."""
        loop = asyncio.get_running_loop()
        match fault.kind.name:
            case "http gets strays":
                link, number = self._stack.http[fault.target], 0
                while loop.time() < until_s:
                    number += link.stray(STRAYS[number % len(STRAYS)]) > 0
                    await asyncio.sleep(_STRAYS_S)
            case "router's names fail":  # and connections end, so that names are asked for
                while loop.time() < until_s:
                    for replica in REPLICAS:
                        self._stack.http[f"{fault.target}-{replica}"].end_idle()
                    await asyncio.sleep(_IDLE_S)
            case _:
                await asyncio.sleep(fault.duration_s)

    # ---------------------------------------------------------------- processes

    @asynccontextmanager
    async def _killed(self, name: str) -> AsyncIterator[None]:
        server = self._stack.servers[name]
        await server.kill()
        try:
            yield
        finally:
            await server.start()

    @asynccontextmanager
    async def _ended(self, name: str) -> AsyncIterator[None]:
        server = self._stack.servers[name]
        await server.end()
        try:
            yield
        finally:
            await server.start()

    @asynccontextmanager
    async def _paused(self, name: str) -> AsyncIterator[None]:
        server = self._stack.servers[name]
        server.pause()
        try:
            yield
        finally:
            server.resume()

    def _armed(self, fault: dict[str, Any]) -> Callable[[str], AbstractAsyncContextManager[None]]:
        """Set a fault switch of an engine; faults of requests end with the context."""

        @asynccontextmanager
        async def armed(name: str) -> AsyncIterator[None]:
            url = f"{self._stack.replica_urls[name]}/emulator/faults"
            async with _client() as client:
                async with client.post(url, data=orjson.dumps(fault)):
                    pass
                try:
                    yield
                finally:
                    if "probability" in fault:
                        async with client.delete(url):
                            pass

        return armed

    def _ordered(self, begin: str, end: str) -> Callable[[str], AbstractAsyncContextManager[None]]:
        """Send an engine an order of an operator, and undo it at the end."""

        @asynccontextmanager
        async def ordered(name: str) -> AsyncIterator[None]:
            url = self._stack.replica_urls[name]
            async with _client() as client:
                async with client.post(url + begin):
                    pass
                try:
                    yield
                finally:
                    async with client.post(url + end):
                        pass

        return ordered

    # ---------------------------------------------------------------- a router's surroundings

    @asynccontextmanager
    async def _clock_stepped(self, router: str) -> AsyncIterator[None]:
        file = self._stack.surroundings_of(router)
        surroundings.step(file, -3600.0 if router == "a" else 86_400.0)
        try:
            yield
        finally:
            surroundings.step(file, 0.0)

    @asynccontextmanager
    async def _names_fail(self, router: str) -> AsyncIterator[None]:
        """Make a router's resolver fail: it has no answer, or says that there is no such name."""
        file = self._stack.surroundings_of(router)
        surroundings.fail_names(file, socket.EAI_AGAIN if router == "a" else socket.EAI_NONAME)
        try:
            yield
        finally:
            surroundings.fail_names(file, 0)

    @asynccontextmanager
    async def _out_of_descriptors(self, router: str) -> AsyncIterator[None]:
        pid = self._stack.servers[router].pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + _SPARE_DESCRIPTORS, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    @asynccontextmanager
    async def _disk_hangs(self, router: str) -> AsyncIterator[None]:
        self._stack.disks[router].hang()
        try:
            yield
        finally:
            self._stack.disks[router].go_on()

    @asynccontextmanager
    async def _large_bodies(self, router: str) -> AsyncIterator[None]:
        await self._send_large(router)
        yield

    # ---------------------------------------------------------------- Redis

    @asynccontextmanager
    async def _redis_full(self, _: str) -> AsyncIterator[None]:
        await self._redis(f"CONFIG SET maxmemory {_FULL_BYTES}")
        try:
            yield
        finally:
            await self._redis("CONFIG SET maxmemory 0")

    @asynccontextmanager
    async def _redis_emptied(self, _: str) -> AsyncIterator[None]:
        await self._redis("FLUSHALL")
        yield

    async def _redis(self, command: str) -> None:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._stack.redis_port)
            try:
                writer.write(command.encode() + b"\r\n")
                answer = await reader.readline()
            finally:
                writer.close()
        if not answer.startswith(b"+OK"):
            raise RuntimeError(f"Redis refused {command!r}: {answer.decode(errors='replace')}")


def _client() -> aiohttp.ClientSession:
    """Make a client of an engine's own port; an order that it refuses is an error."""
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    return aiohttp.ClientSession(timeout=timeout, raise_for_status=True)
