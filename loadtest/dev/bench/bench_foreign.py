"""What a request of another router costs: CPU of a router that it does not come to, and of Redis.

All requests go to the first of two routers, at a steady rate: chats of 5,500 tokens of which 4,500
are new, answered at once by two emulated replicas whose caches never fill. CPU is that of the
process, all its threads. What it used in as much time without requests is not in it.
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

from loadtest import agent_text
from loadtest.dev.bench.bench_redis import redis_server
from loadtest.dev.bench.client import Connection, request_bytes
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from loadtest.runner.stack import Router, start_replicas, start_router

_RATE: Final = 70.0
_NUM_ROUTERS: Final = 2
_NUM_REPLICAS: Final = 2
_NUM_BLOCKS: Final = 1_000_000  # of a replica: never full
_NUM_WARM: Final = 50
_SHARED_TOKENS: Final = 1_000
_NEW_TOKENS: Final = 4_500
_NUM_CONNECTIONS: Final = 16


def run(setting: Setting) -> list[Line]:
    """Measure."""
    seconds = setting.size(20, 2)
    num_requests = round(_RATE * seconds)
    own_ms, other_ms, redis_ms = asyncio.run(_measure(setting.work_dir, num_requests, seconds))
    return [
        Line(
            what=f"{of} a request of 5,500 tokens, 4,500 new; caches are filling",
            unit="ms",
            num_samples=num_requests,
            value=value,
            budgets=(Budget("value", limit),) if limit else (),
        )
        for of, value, limit in (
            ("CPU of the router that gets", own_ms, None),
            ("CPU of another router for", other_ms, 0.08),
            ("CPU of Redis for", redis_ms, 0.1),
        )
    ]


async def _measure(work_dir: Path, num_requests: int, seconds: float) -> list[float]:
    """Return the CPU a request in ms: of the router asked, of the other one, of Redis."""
    async with _running(work_dir) as (routers, redis_pid):
        port = int(routers[0].url.rpartition(":")[2])
        await _send(port, list(_bodies(_NUM_WARM, seed=1)))
        pids = [*(router.child.pid for router in routers), redis_pid]
        await asyncio.sleep(2.0)
        idle = await _used(pids, seconds, None)
        requests = list(_bodies(num_requests, seed=2))
        busy = await _used(pids, seconds, _send(port, requests))
    return [(b - i) / num_requests * 1000 for b, i in zip(busy, idle, strict=True)]


@asynccontextmanager
async def _running(work_dir: Path) -> AsyncIterator[tuple[list[Router], int]]:
    emulate = ["--preset", "instant", "--num-gpu-blocks", str(_NUM_BLOCKS)]
    emulate += ["--max-model-len", "100000", "--reply-tokens", "4"]
    async with AsyncExitStack() as stack:
        client = stack.enter_context(redis_server(work_dir))
        port = client.connection_pool.connection_kwargs["port"]
        replicas = await stack.enter_async_context(start_replicas(emulate, _NUM_REPLICAS, work_dir))
        urls = [child.announced[1] for child in replicas]
        routers = []
        for number in range(_NUM_ROUTERS):
            folder = work_dir / f"router-{number}"
            folder.mkdir(exist_ok=True)
            shared = ["--redis", f"redis://127.0.0.1:{port}/0"]
            routers.append(await stack.enter_async_context(start_router(urls, shared, folder)))
        yield routers, int(client.info("server")["process_id"])


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


async def _send(port: int, requests: Sequence[bytes]) -> None:
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
                await asyncio.sleep(start_s + number / _RATE - time.perf_counter())
                group.create_task(send(request, await free.get()), name="request")


async def _used(pids: Sequence[int], seconds: float, doing: Awaitable[None] | None) -> list[float]:
    """Measure the CPU that each process uses in `seconds`, or longer if `doing` takes longer."""
    before = [_cpu_s(pid) for pid in pids]
    start_s = time.perf_counter()
    if doing is not None:
        await doing
    await asyncio.sleep(max(0.0, start_s + seconds - time.perf_counter()))
    taken_s = time.perf_counter() - start_s
    return [(_cpu_s(pid) - b) * seconds / taken_s for pid, b in zip(pids, before, strict=True)]


def _cpu_s(pid: int) -> float:
    """Read the CPU time of a process, all its threads, to a microsecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
