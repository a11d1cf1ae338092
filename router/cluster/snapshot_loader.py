"""Loads from Redis the blocks of candidates that this router begins to follow."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from msgspec import Struct

from router.base.messages import Position, StreamHead, StreamId, StreamStatus
from router.cluster.redis_log import LogPart, LogReader
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
    num_logged: int = 0  # keys in its log, with repetitions


class _WantedStream(Struct):
    result: asyncio.Future[Loaded | None]
    until_s: float


class SnapshotLoader:
    """Loads streams, several in each round trip."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._wanted: dict[StreamId, _WantedStream] = {}
        self.num_loads = 0

    async def load(self, stream_id: StreamId) -> Loaded | None:
        """Load a stream's blocks; None: Redis does not have them."""
        self._end(stream_id, None)  # a wait for it that is over, or has no other end
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
        """Load the streams that are wanted now, if Redis has them."""
        started_s = time.monotonic()
        readers = {stream_id: LogReader() for stream_id in self._wanted}
        num_streams = num_blocks = 0
        while readers:
            parts = await self._store.read_logs(readers)
            for stream_id, part in parts.items():
                await _apply(readers[stream_id], part)
                if part.is_end:
                    loaded = self._judge(stream_id, part, readers.pop(stream_id), started_s)
                    num_streams += loaded is not None
                    num_blocks += loaded.staged.num_blocks() if loaded is not None else 0
        if num_streams:
            seconds = round(time.monotonic() - started_s, 2)
            logger.info(
                "cache contents loaded from redis",
                extra={"streams": num_streams, "blocks": num_blocks, "seconds": seconds},
            )

    def _judge(
        self, stream_id: StreamId, part: LogPart, reader: LogReader, started_s: float
    ) -> Loaded | None:
        """End the wait for a stream that was read, unless another router is writing it."""
        head, wanted = part.head, self._wanted.get(stream_id)
        if wanted is None:
            return None
        if head is not None and head.position is None and started_s < wanted.until_s:
            return None
        loaded = None
        if head is not None and head.position is not None and head.status is not None:
            loaded = Loaded(
                head=head,
                position=head.position,
                status=head.status,
                staged=reader.blocks,
                newest=head.newest,
                num_logged=reader.num_keys,
            )
            self.num_loads += 1
        self._end(stream_id, loaded)
        return loaded

    def _end(self, stream_id: StreamId, loaded: Loaded | None) -> None:
        wanted = self._wanted.pop(stream_id, None)
        if wanted is not None and not wanted.result.done():
            wanted.result.set_result(loaded)


async def _apply(reader: LogReader, part: LogPart) -> None:
    reader.begin(part)
    until_s = time.monotonic() + _SLICE_S
    for entry in part.entries:
        reader.apply(entry)
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = time.monotonic() + _SLICE_S
