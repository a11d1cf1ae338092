"""Requests a second through one router process: 20 KB bodies, 16 in flight, warm.

Sixteen connections, each with a conversation of its own, send as fast as they are answered; the
replicas answer at once. The same straight to a replica shows that neither client nor replica is
the limit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import uvloop

from loadtest.dev.bench.client import Connection, hammer
from loadtest.dev.bench.conversations import Prepared, of_size
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.rig import Rig, RigError, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_IN_FLIGHT: Final = 16
_BODY_BYTES: Final = 20_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    bodies = [of_size(prompter, f"throughput-{n}", _BODY_BYTES) for n in range(_IN_FLIGHT)]
    seconds = setting.size(60, 3) / 10
    async with start_rig(setting) as rig:
        requests = [await _warm(rig, prepared) for prepared in bodies]
        cpu_s = rig.cpu_s()
        num, elapsed_s = await _hammer(setting, rig.port, requests, seconds, "requests/s")
        cpu_ms = (rig.cpu_s() - cpu_s) / num * 1000
        direct, direct_s = await _hammer(setting, rig.direct_port, requests, seconds / 3, "direct")
    return [
        Line(
            what=f"requests/s in one process, 20 KB, {_IN_FLIGHT} in flight",
            unit="1/s",
            num_samples=num,
            value=num / elapsed_s,
            budgets=(Budget("value", 2000.0, is_floor=True),),
            note=f"direct {direct / direct_s:,.0f}/s; {cpu_ms:.2f} ms of router CPU a request",
        ),
    ]


async def _warm(rig: Rig, prepared: Prepared) -> bytes:
    async with Connection(rig.port) as connection:
        replica = await rig.warm(connection, prepared)
        request = prepared.request(num_cached_tokens=rig.num_cached_tokens(prepared, replica))
        rig.check(prepared, await connection.send(request), replica)
    if rig.num_wrong:
        raise RigError("a prediction was wrong before the load began")
    return request


async def _hammer(
    setting: Setting, port: int, requests: list[bytes], seconds: float, what: str
) -> tuple[int, float]:
    """Send each request over and over for some seconds; return how many answers came, and when."""
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        load = group.create_task(hammer(port, requests, seconds), name="load")
        for _ in setting.track(range(round(seconds * 10)), what):
            await asyncio.sleep(0.1)
    return load.result(), time.perf_counter() - start_s
