"""What a replica without requests costs a router: probes, its figures, its event stream.

Two routers run beside each other, one with a few replicas and one with many, at default intervals:
the difference is what a replica takes. Once alone, once with a Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import psutil
import uvloop

from loadtest.dev.bench.bench_redis import redis_server
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.rig import fake_replicas
from loadtest.dev.bench.setting import Setting
from loadtest.runner.stack import start_router

_FEW: Final = 4


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    many = setting.size(64, 8)
    async with fake_replicas(many, setting.model_dir, setting.work_dir) as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        alone = await _of_a_replica(setting, urls, [])
        with redis_server(setting.work_dir) as client:
            port = client.connection_pool.connection_kwargs["port"]
            shared = await _of_a_replica(setting, urls, ["--redis", f"redis://127.0.0.1:{port}/0"])
    return [
        Line(
            what=f"a replica without requests, {where}",
            unit="% of a core",
            num_samples=many - _FEW,
            value=value,
            budgets=(Budget("value", 0.05),),
            note=f"{many} replicas against {_FEW}",
        )
        for where, value in (("one router", alone), ("with Redis", shared))
    ]


async def _of_a_replica(setting: Setting, urls: Sequence[str], flags: Sequence[str]) -> float:
    """Return what a replica takes, in percent of a core."""
    seconds = setting.size(40, 2) / 2
    async with AsyncExitStack() as stack:
        processes = []
        for name, some in (("few", urls[:_FEW]), ("many", urls)):
            folder = setting.work_dir / name
            folder.mkdir(exist_ok=True)
            namespace = ["--set", f"redis.namespace={name}"] if flags else []
            router = await stack.enter_async_context(
                start_router(some, [*flags, *namespace], folder)
            )
            processes.append(psutil.Process(router.child.pid))
        await asyncio.sleep(setting.size(20, 2) / 2)  # streams are read, token ids compared
        before = [_cpu_s(process) for process in processes]
        for _ in setting.track(range(round(seconds)), "idle"):
            await asyncio.sleep(1.0)
        few_s, many_s = (_cpu_s(p) - b for p, b in zip(processes, before, strict=True))
    return (many_s - few_s) / (len(urls) - _FEW) / seconds * 100


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
