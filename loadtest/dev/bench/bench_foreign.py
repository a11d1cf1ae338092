"""What a request of another router costs: CPU of a router that it does not come to, and of Redis.

All requests go to the first router, at a steady rate: chats of 5,500 tokens of which 4,500 are new,
answered at once by two emulated replicas. CPU is that of the process, all its threads. What it used
in as much time without requests is not in it.

Caches that never fill store 281 blocks a request. Full ones also evict as many, each in an event of
its own, as vLLM does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import redis
from msgspec import Struct

from loadtest import agent_text
from loadtest.dev.bench.bench_redis import redis_server
from loadtest.dev.bench.client import Connection, request_bytes
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from loadtest.runner.stack import Router, start_replicas, start_router

RATE: Final = 70.0
_NUM_REPLICAS: Final = 2
_SHARED_TOKENS: Final = 1_000
_NEW_TOKENS: Final = 4_500
_NUM_CONNECTIONS: Final = 16
LARGE: Final = 1_000_000  # blocks: never full
SMALL: Final = 16_384  # full after two seconds


class Cost(Struct, frozen=True, kw_only=True):
    """CPU a request in ms: of the router that was asked, of each other one, of Redis."""

    own_ms: float
    other_ms: float
    redis_ms: float
    num_requests: int
    commands: dict[str, tuple[float, float]]  # of Redis: calls and ms, a request each


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines: list[Line] = []
    caches = ("filling",) if setting.quick else ("filling", "full")
    for number, each in enumerate(setting.track(caches, "foreign requests")):
        folder = setting.work_dir / f"foreign-{number}"
        folder.mkdir()
        num_blocks = LARGE if each == "filling" else SMALL
        seconds = setting.size(20, 2)
        cost = asyncio.run(measure(folder, num_routers=2, num_blocks=num_blocks, seconds=seconds))
        lines += _lines(cost, each)
    return lines


def _lines(cost: Cost, caches: str) -> list[Line]:
    request = f"request of 5,500 tokens, 4,500 new; caches are {caches}"
    return [
        Line(
            what=f"{of} a {request}",
            unit="ms",
            num_samples=cost.num_requests,
            value=value,
            budgets=(Budget("value", limit),) if limit and caches == "filling" else (),
        )
        for of, value, limit in (
            ("CPU of the router that gets", cost.own_ms, None),
            ("CPU of another router for", cost.other_ms, 0.08),
            ("CPU of Redis for", cost.redis_ms, 0.1),
        )
    ]


async def measure(
    work_dir: Path,
    *,
    num_routers: int,
    num_blocks: int = LARGE,
    rate: float = RATE,
    seconds: float = 20.0,
    flags: Sequence[str] = (),
    during: str = "",
) -> Cost:
    """Measure one setting.

    Args:
        num_blocks: Of each replica's cache.
        flags: Of the routers.
        during: A shell command to run while requests come; `{router}`, `{other}` and `{redis}` are
            numbers of processes.
    """
    async with _running(work_dir, num_routers, num_blocks, flags) as (routers, client):
        num_warm = round(1.2 * _NUM_REPLICAS * num_blocks / 281) if num_blocks < LARGE else 50
        port = int(routers[0].url.rpartition(":")[2])
        await _send(port, list(_bodies(num_warm, seed=1)), rate)
        pids = [router.child.pid for router in routers]
        redis_pid = int(client.info("server")["process_id"])
        await asyncio.sleep(2.0)
        idle = await _used(pids, redis_pid, seconds, None)
        requests = list(_bodies(round(rate * seconds), seed=2))
        if during:
            command = during.format(router=pids[0], other=pids[-1], redis=redis_pid)
            watcher = await asyncio.create_subprocess_shell(command)
        client.config_resetstat()
        busy = await _used(pids, redis_pid, seconds, _send(port, requests, rate))
        commands = {
            name.removeprefix("cmdstat_"): (
                stat["calls"] / len(requests),
                stat["usec"] / 1000 / len(requests),
            )
            for name, stat in client.info("commandstats").items()
        }
        if during:
            await watcher.wait()
    per_request = [(b - i) / len(requests) * 1000 for b, i in zip(busy, idle, strict=True)]
    own, *others, of_redis = per_request
    return Cost(
        own_ms=own,
        other_ms=sum(others) / len(others) if others else 0.0,
        redis_ms=of_redis,
        num_requests=len(requests),
        commands=commands,
    )


@asynccontextmanager
async def _running(
    work_dir: Path, num_routers: int, num_blocks: int, flags: Sequence[str]
) -> AsyncIterator[tuple[list[Router], redis.Redis]]:
    emulate = ["--preset", "instant", "--num-gpu-blocks", str(num_blocks)]
    emulate += ["--max-model-len", "100000", "--reply-tokens", "4"]
    async with AsyncExitStack() as stack:
        client = stack.enter_context(redis_server(work_dir))
        port = client.connection_pool.connection_kwargs["port"]
        replicas = await stack.enter_async_context(start_replicas(emulate, _NUM_REPLICAS, work_dir))
        urls = [child.announced[1] for child in replicas]
        routers = []
        for number in range(num_routers):
            folder = work_dir / f"router-{number}"
            folder.mkdir(exist_ok=True)
            shared = ["--redis", f"redis://127.0.0.1:{port}/0", *flags]
            routers.append(await stack.enter_async_context(start_router(urls, shared, folder)))
        yield routers, client


def _bodies(num: int, seed: int) -> Iterator[bytes]:
    """Yield requests that share a system prompt."""
    system = agent_text.code(random.Random("shared"), _SHARED_TOKENS)
    for number in range(num):
        text = agent_text.code(random.Random(f"{seed}-{number}"), _NEW_TOKENS)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{seed}-{number}\n{text}"},
        ]
        body: dict[str, Any] = {"model": "tiny", "messages": messages, "stream": True}
        yield request_bytes("/v1/chat/completions", orjson.dumps({**body, "max_tokens": 4}))


async def _send(port: int, requests: Sequence[bytes], rate: float) -> None:
    """Send requests at a steady rate, each on a connection that is free."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        for _ in range(_NUM_CONNECTIONS):
            free.put_nowait(await stack.enter_async_context(Connection(port)))
        start_s = time.perf_counter()

        async def send(request: bytes, connection: Connection) -> None:
            answer = await connection.send(request)
            if answer.status != 200:
                raise RuntimeError(f"the router answered {answer.status}: {answer.body[:300]!r}")
            free.put_nowait(connection)

        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                await asyncio.sleep(start_s + number / rate - time.perf_counter())
                group.create_task(send(request, await free.get()), name="request")


async def _used(
    pids: Sequence[int], redis_pid: int, seconds: float, doing: Awaitable[None] | None
) -> list[float]:
    """Measure the CPU that each process uses in `seconds`, or longer if `doing` takes longer."""
    every = [*pids, redis_pid]
    before = [_cpu_s(pid) for pid in every]
    start_s = time.perf_counter()
    if doing is not None:
        await doing
    await asyncio.sleep(max(0.0, start_s + seconds - time.perf_counter()))
    taken_s = time.perf_counter() - start_s
    return [(_cpu_s(pid) - b) * seconds / taken_s for pid, b in zip(every, before, strict=True)]


def _cpu_s(pid: int) -> float:
    """Read the CPU time of a process, all its threads, to a microsecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
