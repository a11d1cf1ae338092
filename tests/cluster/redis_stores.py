"""Stores for tests: deadlines that a busy machine keeps, and deltas written in few words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from router.base.contracts import BlockKey
from router.base.messages import Delta, SharedTier, StreamId, TierChange, is_pool_stream, pack_keys
from router.cluster.following import LogTails
from router.cluster.redis_snapshot import LogReader
from router.cluster.redis_store import RedisStore
from router.config import RedisConfig

R1, R2 = StreamId("r1#0"), StreamId("http://127.0.0.1:8000#1")
POOL_STREAM = StreamId("pool/some/model")


def config(url: str | None, **options: Any) -> RedisConfig:
    """Configure without haste."""
    patient = {"timeout_s": 10.0, "lookup_timeout_s": 10.0, "lease_s": 60.0}
    return RedisConfig(url=url, **{**patient, **options})


@asynccontextmanager
async def opened(
    url: str | None, router: str = "router-1", password: str | None = None, **options: Any
) -> AsyncIterator[RedisStore]:
    """Open a store."""
    store = RedisStore(config(url, **options), router=router, password=password)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def stored(
    stream_id: StreamId, keys: Iterable[int], tier: SharedTier = "gpu", **more: Any
) -> Delta:
    """Write that blocks are held."""
    changes = (TierChange(tier, stored=pack(keys)),)
    return Delta(stream_id=stream_id, changes=changes, **more)


def removed(
    stream_id: StreamId, keys: Iterable[int], tier: SharedTier = "gpu", **more: Any
) -> Delta:
    """Write that blocks are not held."""
    changes = (TierChange(tier, removed=pack(keys)),)
    return Delta(stream_id=stream_id, changes=changes, **more)


def pack(keys: Iterable[int]) -> bytes:
    """Pack plain ints."""
    return pack_keys(keys)  # type: ignore[arg-type]


async def read(store: RedisStore, *stream_ids: StreamId) -> dict[StreamId, LogReader]:
    """Read replicas' logs to their ends."""
    readers = {stream_id: LogReader() for stream_id in stream_ids}
    left = readers
    while left:
        parts = await store.read_logs(left)
        for stream_id, part in parts.items():
            readers[stream_id].begin(part)
            for entry in part.entries:
                readers[stream_id].apply(entry)
        left = {stream_id: left[stream_id] for stream_id in left if not parts[stream_id].is_end}
    return readers


async def blocks(
    store: RedisStore, stream_ids: Iterable[StreamId]
) -> dict[tuple[StreamId, SharedTier], set[int]]:
    """Gather what Redis has of replicas and pools."""
    asked = list(stream_ids)
    held: dict[tuple[StreamId, SharedTier], set[int]] = {}
    logs = await read(store, *(each for each in asked if not is_pool_stream(each)))
    for stream_id, reader in logs.items():
        for tier, copies in reader.blocks.copies.items():
            if copies:
                held[stream_id, tier] = set(copies)
    pools = await store.pool_snapshot([each for each in asked if is_pool_stream(each)])
    async for part in pools.slices():
        for stream_id, keys in part.items():
            assert not held.setdefault((stream_id, "pool"), set()) & set(keys.tolist())
            held[stream_id, "pool"].update(keys.tolist())
    return held


async def lookup(
    store: RedisStore, keys: Iterable[int], *stream_ids: StreamId
) -> dict[tuple[StreamId, SharedTier], int]:
    """Look a chain up in replicas' logs."""
    chain = [BlockKey(key) for key in keys]
    return await LogTails(store, timeout_s=10.0).lookup(chain, stream_ids)
