"""Stores for tests: deadlines that a busy machine keeps, and deltas written in few words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from router.base.messages import Delta, SharedTier, StreamId, TierChange, pack_keys
from router.cluster.redis_snapshot import Holder, IndexSnapshot
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


async def blocks(snapshot: IndexSnapshot) -> dict[Holder, set[int]]:
    """Gather a snapshot."""
    held: dict[Holder, set[int]] = {}
    async for part in snapshot.slices():
        for holder, keys in part.items():
            assert not held.setdefault(holder, set()) & set(keys.tolist())
            held[holder].update(keys.tolist())
    return held
