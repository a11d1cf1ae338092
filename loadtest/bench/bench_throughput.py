"""Requests a second through one router process: 20 KB bodies, 16 in flight, warm.

Sixteen connections, each with a conversation of its own, send as fast as they are answered; the
replicas answer at once. Once without and once with decision records written to a file. Beside it,
the same straight to a replica, to show that neither client nor replica is what limits; and through
a bare proxy (loadtest.bench.bare_proxy), to show what the HTTP library takes of it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import psutil
import uvloop

from loadtest.bench.client import Connection, hammer
from loadtest.bench.conversations import Prepared, of_size
from loadtest.bench.measures import Budget, Line
from loadtest.bench.rig import Rig, RigError, helper, start_rig
from loadtest.bench.setting import Setting
from router.tokens import load_prompter

_IN_FLIGHT: Final = 16
_BODY_BYTES: Final = 20_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    bodies = [of_size(prompter, f"throughput-{n}", _BODY_BYTES) for n in range(_IN_FLIGHT)]
    records = ("--decision-log", str(setting.work_dir / "decisions.jsonl"))
    lines: list[Line] = []
    for flags, what, budgets in (
        ((), "requests/s", (Budget("value", 2000.0, is_floor=True),)),
        (records, "requests/s, decision records on", ()),
    ):
        async with start_rig(setting, *flags) as rig:
            requests = [await _warm(rig, prepared) for prepared in bodies]
            seconds = setting.size(60, 3) / 10
            cpu_s = rig.cpu_s()
            num, elapsed_s = await _hammer(setting, rig.port, requests, seconds, what)
            cpu_ms = (rig.cpu_s() - cpu_s) / num * 1000
            if not lines:
                direct, direct_s = await _hammer(
                    setting, rig.direct_port, requests, seconds / 3, "direct"
                )
                direct_note = f"direct {direct / direct_s:,.0f}/s; "
                bare = await _bare(setting, rig.direct_port, requests, seconds)
        lines.append(
            Line(
                what=f"{what} in one process, 20 KB, {_IN_FLIGHT} in flight",
                unit="1/s",
                num_samples=num,
                value=num / elapsed_s,
                budgets=budgets,
                note=f"{direct_note}{cpu_ms:.2f} ms of router CPU a request",
            )
        )
    return [*lines, bare]


async def _bare(setting: Setting, port: int, requests: list[bytes], seconds: float) -> Line:
    """Measure a proxy that only passes on."""
    upstream = f"http://127.0.0.1:{port}"
    module = "loadtest.bench.bare_proxy"
    async with helper(module, upstream, log_dir=setting.work_dir) as child:
        own_port = int(child.announced[0])
        num, elapsed_s = await _hammer(setting, own_port, requests, seconds, "bare proxy")
        cpu = psutil.Process(child.pid).cpu_times()
    return Line(
        what=f"requests/s of a bare aiohttp proxy, 20 KB, {_IN_FLIGHT} in flight",
        unit="1/s",
        num_samples=num,
        value=num / elapsed_s,
        note=f"{(cpu.user + cpu.system) / num * 1000:.2f} ms of its CPU a request, its start "
        "included; it knows nothing of tokens, replicas or limits",
    )


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
