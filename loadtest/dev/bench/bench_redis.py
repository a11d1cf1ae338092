"""Memory of the shared index in Redis: bytes a block of a replica.

A Redis of its own (the first `redis-server` found) on the same machine, nothing saved, and one
store as a router has it. Written are deltas of 1,000 new blocks.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import redis

from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from loadtest.engines.ports import free_port
from loadtest.runner.stack import redis_binary
from router.base.contracts import KEY_BITS
from router.base.messages import Delta, StreamId, TierChange
from router.cluster.redis_store import RedisStore, Written
from router.config import RedisConfig

_BLOCKS_A_DELTA: Final = 1_000
_NUM_HOLDERS: Final = 8


def run(setting: Setting) -> list[Line]:
    """Measure."""
    with redis_server(setting.work_dir) as client:
        return asyncio.run(_memory(setting, client))


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


async def _memory(setting: Setting, client: redis.Redis) -> list[Line]:
    """Measure writing one replica's blocks, then eight's."""
    port = client.connection_pool.connection_kwargs["port"]
    config = RedisConfig(
        url=f"redis://127.0.0.1:{port}/0", timeout_s=60, lookup_timeout_s=10, lease_s=600
    )
    store = RedisStore(config, router="bench", password=None)
    await store.open()
    num_blocks = setting.size(1_000_000, 8_192)
    keys = np.random.default_rng(1).integers(0, 1 << KEY_BITS, num_blocks, dtype=np.uint64)
    before = client.info("memory")["used_memory"]
    lines = []
    for number in setting.track(range(1, _NUM_HOLDERS + 1), "redis"):
        stream_id = StreamId(f"r{number}#0")
        await store.hold([stream_id])
        deltas = [
            Delta(
                stream_id=stream_id,
                changes=(TierChange("gpu", keys[at : at + _BLOCKS_A_DELTA].tobytes()),),
            )
            for at in range(0, num_blocks, _BLOCKS_A_DELTA)
        ]
        assert set(await store.write(deltas)) <= {Written.OK}
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
    await store.close()
    return lines
