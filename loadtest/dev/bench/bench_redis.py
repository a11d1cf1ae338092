"""The shared index in Redis: writing, looking up, memory, and loading all of it.

A Redis of its own (the first `redis-server` found) on the same machine, nothing saved, and one
store as a router has it. Written: deltas of 1,000 new blocks. Looked up: chains of random blocks,
replicas whose prefixes end at different places; one look-up in ten reads new blocks. On the server:
the time of a call by Redis's own count. Round trip: how long the router waits.
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
from router.base.contracts import KEY_BITS, BlockKey
from router.base.messages import Delta, StreamId, TierChange
from router.cluster.log_tails import LogTails
from router.cluster.redis_log import LogReader
from router.cluster.redis_store import RedisStore, Written
from router.config import RedisConfig

_BLOCKS_A_DELTA: Final = 1_000
_BLOCK_TOKENS: Final = 16
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
                    what=f"bytes in Redis for each block of a replica, replicas: {number}, "
                    f"{num_blocks:,} blocks each",
                    unit="bytes",
                    num_samples=1,
                    value=grown / num_blocks / number,
                    budgets=() if setting.quick else (Budget("value", 32.0),),
                    note="a log that begins again; it may grow to three times that",
                )
            )
    lines.append(await _loaded(store, num_blocks))
    await store.close()
    return lines


async def _loaded(store: RedisStore, num_blocks: int) -> Line:
    start_s = time.perf_counter()
    longest_s = 0.0
    stream_id, reader, is_end = StreamId("r1#0"), LogReader(), False
    while not is_end:
        part = (await store.read_logs({stream_id: reader}))[stream_id]
        reader.begin(part)
        for entry in part.entries:
            since_s = time.perf_counter()
            reader.apply(entry)
            longest_s = max(longest_s, time.perf_counter() - since_s)
        is_end = part.is_end
    assert reader.blocks.num_blocks() == num_blocks
    return Line(
        what=f"log of {num_blocks:,} blocks loaded from Redis",
        unit="s",
        num_samples=1,
        value=time.perf_counter() - start_s,
        note=f"longest entry {longest_s * 1000:.1f} ms",
    )


async def _looked_up(setting: Setting, client: redis.Redis) -> list[Line]:
    store = await _opened(client)
    stream_ids = [StreamId(f"r{number + 1}#0") for number in range(_NUM_HOLDERS)]
    tails = LogTails(store, timeout_s=10.0)
    lines = []
    for num_tokens in _PROMPTS:
        rng = random.Random(num_tokens)
        num_blocks = num_tokens // _BLOCK_TOKENS
        on_server_us: list[float] = []
        round_trip_us: list[float] = []
        for sample in range(setting.size(20, 2)):
            keys = _keys(num_blocks, num_tokens + sample)
            chain = [BlockKey(key) for key in keys.tolist()]
            for stream_id in stream_ids:
                await _write(store, stream_id, keys[: rng.randrange(1, num_blocks)])
            client.config_resetstat()
            for _ in range(10):
                start_s = time.perf_counter()
                await tails.lookup(chain, stream_ids)
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
