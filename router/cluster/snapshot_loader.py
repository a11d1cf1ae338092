"""Loads from Redis the blocks of candidates that this router begins to follow."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from msgspec import Struct

from router.base.messages import Position, StreamHead, StreamId, StreamStatus
from router.cluster.redis_snapshot import IndexSnapshot
from router.cluster.redis_store import RedisStore
from router.index.staged_blocks import StagedBlocks

logger = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""Longest wait for a stream that another router is writing as a whole."""

_LOOK_S: Final = 0.02  # streams that are asked for within this time are loaded together
_SLICE_S: Final = 0.002
"""Longest time to stage what was read before requests get a turn. A dict that grows comes on top:
8 to 11 ms for the one of 175,000 blocks."""


class Loaded(Struct):
    """A stream's blocks: all batches up to `position`, and none behind `newest`."""

    head: StreamHead
    position: Position
    status: StreamStatus
    staged: StagedBlocks
    newest: Position | None = None  # None: not known


class _WantedStream(Struct):
    result: asyncio.Future[Loaded | None]
    until_s: float


class SnapshotLoader:
    """Loads streams, several in one pass over the index."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._wanted: dict[StreamId, _WantedStream] = {}
        self.num_loads = 0

    async def load(self, stream_id: StreamId) -> Loaded | None:
        """Load a stream's blocks; None: Redis does not have them."""
        result: asyncio.Future[Loaded | None] = asyncio.get_running_loop().create_future()
        self._wanted[stream_id] = _WantedStream(result, time.monotonic() + WAIT_S)
        return await result

    def cancel(self) -> None:
        """Load nothing: Redis is gone."""
        for stream_id in list(self._wanted):
            self._end(stream_id, None)

    async def run(self) -> None:
        """Load what is wanted, for ever.

        Raises:
            StoreError: Redis is gone or cannot be used.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._wanted:
                await self.load_wanted()

    async def load_wanted(self) -> None:
        """Load the streams that are wanted now, if Redis has them.

        A stream that is asked for meanwhile is not in this snapshot: the next one has it.
        """
        started_s = time.monotonic()
        asked = tuple(self._wanted.items())
        snapshot = await self._store.snapshot([stream_id for stream_id, _ in asked])
        found: dict[StreamId, Loaded] = {}
        for stream_id, wanted in asked:
            head = snapshot.heads.get(stream_id)
            if head is None or (head.position is None and started_s >= wanted.until_s):
                self._end(stream_id, None)
            elif head.position is not None:
                if head.status is None:
                    self._end(stream_id, None)
                else:
                    found[stream_id] = Loaded(head, head.position, head.status, StagedBlocks())
        if not found:
            return
        num_blocks = await _stage(snapshot, found)
        heads = await self._store.heads()
        for stream_id, loaded in found.items():
            loaded.newest = heads[stream_id].newest if stream_id in heads else None
            self.num_loads += 1
            self._end(stream_id, loaded)
        seconds = round(time.monotonic() - started_s, 2)
        logger.info(
            "cache contents loaded from redis",
            extra={"streams": len(found), "blocks": num_blocks, "seconds": seconds},
        )

    def _end(self, stream_id: StreamId, loaded: Loaded | None) -> None:
        wanted = self._wanted.pop(stream_id, None)
        if wanted is not None and not wanted.result.done():
            wanted.result.set_result(loaded)


async def _stage(snapshot: IndexSnapshot, found: dict[StreamId, Loaded]) -> int:
    """Read the streams' blocks; count them."""
    num_blocks = 0
    async for blocks in snapshot.slices():
        until_s = time.monotonic() + _SLICE_S
        for (stream_id, tier), keys in blocks.items():
            if stream_id in found and tier != "pool":
                found[stream_id].staged.add(tier, keys)
                num_blocks += len(keys)
            if time.monotonic() >= until_s:  # blocks are spread evenly: all dicts grow at once
                await asyncio.sleep(0)
                until_s = time.monotonic() + _SLICE_S
    for (stream_id, tier), copies in (await snapshot.copies()).items():
        if stream_id in found and tier != "pool":
            found[stream_id].staged.add(tier, (), copies.items())
    return num_blocks
