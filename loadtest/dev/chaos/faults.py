"""Make and end the planned faults: what begins each kind, and what ends it.

A fault is over when its target works again. A killed process, for example, must be ready again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import aiohttp
import orjson
from msgspec import Struct

from loadtest.dev.chaos import surroundings
from loadtest.dev.chaos.link import Link, Mode
from loadtest.dev.chaos.plan import AT_ONCE, Fault, touches
from loadtest.dev.chaos.stack import Stack

_ASK_S: Final = 5.0
_SPARE_DESCRIPTORS: Final = 3
_FULL_BYTES: Final = 1_000_000  # less than an empty Redis takes: every write is refused
_SWITCHES: Final[Mapping[str, dict[str, Any]]] = {
    "replica answers 500": {"kind": "status", "probability": 0.7},
    "replica dies in answers": {"kind": "die_after", "probability": 0.7, "after_tokens": 3},
    "replica hangs": {"kind": "hang", "probability": 0.7},
    "replica aborts before answers": {"kind": "abort", "probability": 0.7, "after_tokens": 0},
    "replica aborts in answers": {"kind": "abort", "probability": 0.7, "after_tokens": 3},
    "garbage events": {"kind": "garbage_events", "count": 6},
    "events lost": {"kind": "drop_events", "count": 3},
}
"""Fault switches of the emulator; those of requests last until they are taken back."""
_ORDERS: Final[Mapping[str, tuple[str, str]]] = {
    "replica pauses by order": ("/pause?mode=keep&clear_cache=false", "/resume"),
    "replica sleeps": ("/sleep?level=1", "/wake_up"),
}
_MODES: Final[Mapping[str, Mode]] = {
    "held": "hole", "refused": "refuse", "slow": "slow", "drips": "drip"
}  # fmt: skip

Do = Callable[[], Awaitable[None]]


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
            begin, end = self._steps(fault.kind.name, fault.target)
            await begin()
            try:
                await asyncio.sleep(fault.duration_s)
            finally:
                await end()
        except (OSError, RuntimeError, aiohttp.ClientError, TimeoutError) as exc:
            done.error = repr(exc)  # a process is gone already, say: the next fault goes on
        finally:
            done.end_s = loop.time()

    def _steps(self, name: str, target: str) -> tuple[Do, Do]:
        """Return what begins a fault, and what ends it."""
        subject, _, what = name.partition(" ")
        if name in _SWITCHES:
            return self._switched(target, _SWITCHES[name])
        if name in _ORDERS:
            begin, end = _ORDERS[name]
            return self._asked(target, "POST", begin), self._asked(target, "POST", end)
        if what in _MODES or what in ("reset", "half-closed"):
            return self._linked(self._links(subject, target), what)
        match name:
            case "router's clock stepped":
                file = self._stack.surroundings_of(target)
                offset_s = -3600.0 if target == "a" else 86_400.0
                return _later(surroundings.step, file, offset_s), _later(surroundings.step, file, 0)
            case "router out of descriptors":
                return self._out_of_descriptors(target)
            case "router's disk hangs":
                disk = self._stack.disks[target]
                return _later(disk.hang), _later(disk.go_on)
            case "router gets large bodies":
                return lambda: self._send_large(target), _nothing
            case "redis full":
                return self._redis(f"CONFIG SET maxmemory {_FULL_BYTES}"), self._redis(
                    "CONFIG SET maxmemory 0"
                )
            case "redis emptied":
                return self._redis("FLUSHALL"), _nothing
        server = self._stack.servers[target]
        match what:
            case "killed":
                return server.kill, server.start
            case "ended":
                return server.end, server.start
            case "paused":
                return _later(server.pause), _later(server.resume)
        raise AssertionError(name)

    def _switched(self, replica: str, fault: Mapping[str, Any]) -> tuple[Do, Do]:
        path = "/emulator/faults"
        begin = self._asked(replica, "POST", path, orjson.dumps(fault))
        return begin, self._asked(replica, "DELETE", path) if "probability" in fault else _nothing

    def _asked(self, replica: str, method: str, path: str, data: bytes | None = None) -> Do:
        """Send a request to an engine's own port; an order that it refuses is an error."""

        async def ask() -> None:
            timeout = aiohttp.ClientTimeout(total=_ASK_S)
            url = self._stack.replica_urls[replica] + path
            async with (
                aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as client,
                client.request(method, url, data=data),
            ):
                pass

        return ask

    def _links(self, subject: str, way: str) -> list[Link]:
        match subject:
            case "http":
                return [self._stack.http[way]]
            case "events":
                return list(self._stack.events[way])
            case "redis":
                return [self._stack.redis_links[way]]
        return [self._stack.http[way], *self._stack.events[way]]

    def _linked(self, links: list[Link], what: str) -> tuple[Do, Do]:
        if what in ("reset", "half-closed"):

            async def cut() -> None:
                for link in links:
                    link.reset() if what == "reset" else link.half_close()

            return cut, _nothing

        def set_to(mode: Mode) -> Do:
            async def set_all() -> None:
                for link in links:
                    await link.set(mode)

            return set_all

        return set_to(_MODES[what]), set_to("open")

    def _out_of_descriptors(self, router: str) -> tuple[Do, Do]:
        pid = self._stack.servers[router].pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{pid}/fd"))
        few = num_open + _SPARE_DESCRIPTORS, before[1]

        async def give_back() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        return _later(resource.prlimit, pid, resource.RLIMIT_NOFILE, few), give_back

    def _redis(self, command: str) -> Do:
        async def say() -> None:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._stack.redis_port)
                try:
                    writer.write(command.encode() + b"\r\n")
                    answer = await reader.readline()
                finally:
                    writer.close()
            if not answer.startswith(b"+OK"):
                raise RuntimeError(f"Redis refused {command!r}: {answer.decode(errors='replace')}")

        return say


def _later(call: Callable[..., Any], *args: Any) -> Do:
    async def do() -> None:
        call(*args)

    return do


async def _nothing() -> None:
    """End a fault that was over in an instant."""
