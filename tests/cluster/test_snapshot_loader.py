"""The loader: each stream gets the blocks that Redis has of it, whenever it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from router.base.messages import Position, StreamId, StreamStatus
from router.cluster.following import SnapshotLoader
from router.cluster.redis_snapshot import LogPart, LogReader
from router.cluster.redis_store import RedisStore
from tests.cluster.redis_stores import R1, R2, config, stored
from tests.engine import CONTRACT
from tests.redis_servers import Start


class SlowStore(RedisStore):
    """A store whose reads take until they are let go."""

    def __init__(self, url: str) -> None:
        super().__init__(config(url), router="one", password=None)
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def read_logs(
        self, readers: Mapping[StreamId, LogReader], *, timeout_s: float | None = None
    ) -> dict[StreamId, LogPart]:
        parts = await super().read_logs(readers, timeout_s=timeout_s)
        self.has_begun.set()
        await self.may_end.wait()
        return parts


async def test_a_stream_asked_for_during_a_load_is_in_the_next_one(start_redis: Start) -> None:
    """Redis has its blocks; that the read under way is of others says nothing of it."""
    store = SlowStore(start_redis().url)
    loader = SnapshotLoader(store)
    status = StreamStatus(state="exact", reason="", contract=CONTRACT, capacity_blocks=100)
    try:
        await store.open()
        await store.hold([R1, R2])
        for stream_id in (R1, R2):
            position = Position(7, b"mark")
            await store.write([stored(stream_id, [1, 2], position=position, status=status)])
        async with asyncio.TaskGroup() as tg:
            first = tg.create_task(loader.load(R1))
            await asyncio.sleep(0)
            loading = tg.create_task(loader.load_wanted())
            await store.has_begun.wait()
            second = tg.create_task(loader.load(R2))
            await asyncio.sleep(0)
            store.may_end.set()
            await loading
            assert first.done()
            assert not second.done()
            await loader.load_wanted()

        for loaded in (first.result(), second.result()):
            assert loaded is not None
            assert loaded.staged.num_blocks() == 2
    finally:
        await store.close()


async def test_a_stream_asked_for_twice_leaves_no_wait_without_an_end(start_redis: Start) -> None:
    """The older wait ends without blocks."""
    loader = SnapshotLoader(SlowStore(start_redis().url))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tg:
        older = tg.create_task(loader.load(R1))
        await asyncio.sleep(0)
        newer = tg.create_task(loader.load(R1))
        assert await older is None
        loader.cancel()
    assert newer.result() is None
