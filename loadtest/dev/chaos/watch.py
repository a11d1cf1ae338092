"""Gauges, memory and descriptors of the routers during a run."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from pathlib import Path
from typing import Final

import aiohttp
from msgspec import Struct

from loadtest.dev.chaos.stack import Server, Stack

_EVERY_S: Final = 1.0
_SAMPLE: Final = re.compile(rb"^(warmroute_[a-z_]+)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_GAUGES: Final = ("warmroute_inflight_requests", "warmroute_inflight_uncached_tokens")


class Sample(Struct, frozen=True, kw_only=True):
    """Memory and descriptors of a router's process at one moment."""

    at_s: float
    rss_bytes: int
    num_descriptors: int


class Watch:
    """Looks at the routers every second; by router and life."""

    def __init__(self, stack: Stack) -> None:
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        self.gauges: dict[tuple[str, int], dict[str, float]] = {}  # the last ones
        self._stack = stack

    async def run(self) -> None:
        """Sample the routers until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Record one sample of every router; one that does not answer is left out."""
        timeout = aiohttp.ClientTimeout(total=1.5)
        async with aiohttp.ClientSession(timeout=timeout) as client, asyncio.TaskGroup() as tg:
            for server in self._stack.routers():
                tg.create_task(self._look_at(client, server))

    async def _look_at(self, client: aiohttp.ClientSession, server: Server) -> None:
        key = (server.name, server.life.number)
        loop = asyncio.get_running_loop()
        sample = _sample(server.pid, loop.time())
        if sample is not None:
            self.samples.setdefault(key, []).append(sample)
        try:
            async with client.get(f"{self._stack.urls[server.name]}/metrics") as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if answer.status == 200 and key == (server.name, server.life.number):
            self.gauges[key] = read_gauges(text)


def read_gauges(page: bytes) -> dict[str, float]:
    """Read those gauges of a `/metrics` page that must end at zero."""
    gauges: Counter[str] = Counter()
    for name, value in _SAMPLE.findall(page):
        if name.decode() in _GAUGES:
            gauges[name.decode()] += round(float(value))
    return dict(gauges)


def _sample(pid: int, at_s: float) -> Sample | None:
    """Read /proc; None: the process has ended, or is about to and has no memory left."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    rss_bytes = int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    if not rss_bytes:
        return None
    return Sample(at_s=at_s, rss_bytes=rss_bytes, num_descriptors=num_descriptors)
