"""The shared index in Redis: writing, looking up, memory, and loading all of it.

A Redis of its own (the first `redis-server` found) on the same machine, nothing saved, and one
store as a router has it. Written: deltas of 1,000 new blocks. Looked up: chains of random blocks,
replicas whose prefixes end at different places. On the server: the time of a call by Redis's own
count. Round trip: how long the router waits. Memory: growth of used_memory without the log.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis

from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.setting import Setting
from loadtest.engines.ports import free_port
from loadtest.runner.stack import redis_binary
from router.base.contracts import KEY_BITS
from router.base.messages import Delta, StreamId, TierChange, pool_stream
from router.cluster.redis_store import RedisStore, Written
from router.config import RedisConfig

_BLOCKS_A_DELTA: Final = 1_000
_BLOCK_TOKENS: Final = 16
_POOL: Final = pool_stream("model")
_NUM_HOLDERS: Final = 8
_PROMPTS: Final = (10_000, 100_000)


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines: list[Line] = []
    with redis_server(setting.work_dir) as client:
        for part in setting.track((_memory, _looked_up), "redis"):
            client.flushall()
            client.config_resetstat()
            lines += asyncio.run(part(setting, client))
    return lines


@contextmanager
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    port = free_port()
    command = [redis_binary(), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=log)
    client = redis.Redis(port=port)
    try:
        for _ in range(500):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait()


async def _write(
    store: RedisStore, stream_id: StreamId, keys: np.ndarray[Any, np.dtype[np.uint64]]
) -> None:
    """Store a replica's blocks on gpu."""
    await store.hold([stream_id])
    deltas = [
        Delta(
            stream_id=stream_id,
            changes=(TierChange("gpu", keys[at : at + _BLOCKS_A_DELTA].tobytes()),),
        )
        for at in range(0, len(keys), _BLOCKS_A_DELTA)
    ]
    assert set(await store.write(deltas)) <= {Written.OK}


async def _opened(client: redis.Redis) -> RedisStore:
    port = client.connection_pool.connection_kwargs["port"]
    config = RedisConfig(
        url=f"redis://127.0.0.1:{port}/0", timeout_s=60, lookup_timeout_s=10, lease_s=600
    )
    store = RedisStore(config, router="bench", password=None)
    await store.open()
    return store


def _keys(num: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(0, 1 << KEY_BITS, num, dtype=np.uint64)


async def _memory(setting: Setting, client: redis.Redis) -> list[Line]:
    """Measure writing one replica's blocks, then eight's, and loading all of them."""
    store = await _opened(client)
    num_blocks = setting.size(1_000_000, 8_192)
    keys = _keys(num_blocks, 1)
    before = client.info("memory")["used_memory"]
    start_s = time.perf_counter()
    await _write(store, StreamId("r1#0"), keys)
    taken_s = time.perf_counter() - start_s
    lines = [
        Line(
            what=f"blocks written to Redis, {_BLOCKS_A_DELTA:,} a delta, one writer",
            unit="blocks/s",
            num_samples=num_blocks,
            value=num_blocks / taken_s,
            note=f"on the server {_server_us(client) / _BLOCKS_A_DELTA:.2f} µs a block",
        )
    ]
    for number in range(1, _NUM_HOLDERS + 1):
        if number > 1:
            await _write(store, StreamId(f"r{number}#0"), keys)
        if number in (1, _NUM_HOLDERS):
            grown = client.info("memory")["used_memory"] - before
            lines.append(
                Line(
                    what=f"bytes per block in Redis, {num_blocks:,} blocks, holders: {number}",
                    unit="bytes",
                    num_samples=1,
                    value=grown / num_blocks,
                    budgets=() if setting.quick else (Budget("value", 32.0),),
                )
            )
    lines.append(await _loaded(store, num_blocks * _NUM_HOLDERS))
    await store.close()
    return lines


async def _loaded(store: RedisStore, num_blocks: int) -> Line:
    start_s = time.perf_counter()
    num_found = 0
    longest_s = since_s = 0.0
    stream_ids = [StreamId(f"r{number}#0") for number in range(1, _NUM_HOLDERS + 1)]
    async for part in (await store.snapshot(stream_ids)).slices():
        now_s = time.perf_counter()
        longest_s, since_s = max(longest_s, now_s - (since_s or now_s)), now_s
        num_found += sum(len(keys) for keys in part.values())
    assert num_found == num_blocks
    return Line(
        what=f"snapshot of {num_blocks:,} blocks loaded from Redis",
        unit="s",
        num_samples=1,
        value=time.perf_counter() - start_s,
        note=f"longest slice {longest_s * 1000:.1f} ms",
    )


async def _looked_up(setting: Setting, client: redis.Redis) -> list[Line]:
    store = await _opened(client)
    stream_ids = [StreamId(f"r{number + 1}#0") for number in range(_NUM_HOLDERS)]
    lines = []
    for num_tokens in _PROMPTS:
        rng = random.Random(num_tokens)
        num_blocks = num_tokens // _BLOCK_TOKENS
        on_server_us: list[float] = []
        round_trip_us: list[float] = []
        for sample in range(setting.size(20, 2)):
            keys = _keys(num_blocks, num_tokens + sample)
            for stream_id in stream_ids:
                await _write(store, stream_id, keys[: rng.randrange(1, num_blocks)])
            client.config_resetstat()
            for _ in range(10):
                start_s = time.perf_counter()
                await store.lookup(keys.tobytes(), [*stream_ids, _POOL])
                round_trip_us.append((time.perf_counter() - start_s) * 1e6)
            on_server_us.append(_server_us(client))
        what = f"look-up in Redis, {num_tokens:,} tokens, replicas: {_NUM_HOLDERS}"
        budgets = (Budget("p50", 300.0),) if num_tokens == _PROMPTS[-1] else ()
        lines.append(distribution(f"{what}, on the server", "µs", on_server_us, *budgets))
        lines.append(distribution(f"{what}, round trip", "µs", round_trip_us))
    await store.close()
    return lines


def _server_us(client: redis.Redis) -> float:
    """Read how long a script call took, on average since the last reset."""
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])
