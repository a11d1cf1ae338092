"""Streamed answers through one router process: CPU of each event.

64 streams run at once, with events 5 ms apart (a word each, as an engine writes them). In
production this takes most of a router's CPU. What the process uses without streams does not count.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson
import uvloop

from loadtest.dev.bench.client import Connection
from loadtest.dev.bench.conversations import of_size, prepare
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.rig import Rig, RigError, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_NUM_STREAMS: Final = 64
_INTERVAL_MS: Final = 5


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    body: dict[str, Any] = orjson.loads(of_size(prompter, "streaming", 2_000).body)
    prepared = prepare(prompter, {**body, "stream": True})
    num_events = setting.size(500, 10)
    request = prepared.request(stream=f"{num_events},{_INTERVAL_MS}")
    async with start_rig(setting) as rig:
        routed = await _event_us(setting, rig, request, num_events)
    return [
        Line(
            what=f"router CPU per streamed event, {_NUM_STREAMS} streams",
            unit="µs",
            num_samples=num_events * _NUM_STREAMS,
            value=routed,
            budgets=(Budget("value", 6.0),),
        ),
    ]


async def _event_us(setting: Setting, rig: Rig, request: bytes, num_events: int) -> float:
    """Send all streams through the router; return the CPU of an event, less what is used anyway."""
    seconds = num_events * _INTERVAL_MS / 1000
    idle_s = rig.cpu_s()
    await asyncio.sleep(seconds)
    idle_s = (rig.cpu_s() - idle_s) / seconds
    before_s, start_s = rig.cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(_NUM_STREAMS):
            group.create_task(_stream(rig.port, request, num_events), name="stream")
        for _ in setting.track(range(num_events // 20), "streams"):
            await asyncio.sleep(_INTERVAL_MS * 20 / 1000)
    taken_s = rig.cpu_s() - before_s - idle_s * (time.perf_counter() - start_s)
    return taken_s / (num_events * _NUM_STREAMS) * 1e6


async def _stream(port: int, request: bytes, num_events: int) -> None:
    async with Connection(port) as connection:
        answer = await connection.send(request)
    num_data = answer.body.count(b"data: ")
    if answer.status != 200 or num_data != num_events + 2:
        raise RigError(f"a stream of {num_data} events came, status {answer.status}")
