"""Follows candidates' engines, each from the blocks that Redis has of it.

`SnapshotLoader` loads these blocks in the background. `LogTails` has the blocks of replicas whose
events this router does not receive, for `index.mode: redis`. Each look-up first reads what was
added to the logs, in one round trip. A log that was never read may take several look-ups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.errors import StoreUnavailable
from router.base.messages import Position, SharedTier, StreamHead, StreamId, StreamStatus
from router.cluster.candidate_source import CandidateNames, CandidateSource
from router.cluster.index_writer import IndexWriter, StreamWriter
from router.cluster.link import Link
from router.cluster.redis_snapshot import LogPart, LogReader
from router.cluster.redis_store import RedisStore
from router.index.cache_view import CacheView
from router.index.copies import Either, StagedBlocks, leading
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream

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


SETTLE_S: Final = 5.0
"""How long a candidate waits for Redis before its engine is followed without the blocks there."""


class Following:
    """Follows candidates, with Redis and without.

    Args:
        caches: Where candidates' streams and blocks are.
        names: The candidates' names among routers.
        writer: Writes what is followed to Redis.
        loader: Loads what Redis has.
        link: Whether Redis is there.
    """

    def __init__(
        self,
        *,
        caches: CacheView,
        names: CandidateNames,
        writer: IndexWriter,
        loader: SnapshotLoader,
        link: Link,
    ) -> None:
        self._caches = caches
        self._names = names
        self._writer = writer
        self._loader = loader
        self._link = link
        self._restarted: set[CandidateId] = set()

    async def follow(self, source: CandidateSource) -> None:
        """Follow a candidate's blocks until cancelled.

        Raises:
            ConfigError: its event endpoint is not valid.
        """
        with closing(source.events()) as events:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._link.settled.wait()
            stream_id = self._names.stream_id_of(source.candidate)
            if stream_id is None:  # removed meanwhile
                return
            writer = self._writer.add(stream_id, source.candidate)
            try:
                await follow(await self.start(writer), events)
            finally:
                self._writer.remove(writer)

    async def start(self, writer: StreamWriter) -> RankStream:
        """Return the candidate's stream, with the blocks that Redis has if nothing is known."""
        candidate, index = writer.candidate, self._caches.index
        stream = self._caches.stream(candidate)
        assert isinstance(stream, RankStream)
        if candidate in self._restarted:  # Redis has the blocks of the process before
            self._restarted.discard(candidate)
            return stream
        if not self._link.is_up or not stream.is_blind:
            return stream
        loaded = await self._loader.load(writer.stream_id)
        if loaded is not None:
            is_usable = stream.resume(
                loaded.position, loaded.status, time.monotonic(), newest=loaded.newest
            )
            if is_usable:
                index.replace(candidate, loaded.staged)
                writer.loaded(loaded.head, loaded.num_logged)
            else:
                index.discard(loaded.staged)
        return stream

    def restarted(self, candidate: CandidateId) -> None:
        """Record that a candidate's engine is a new process, whose cache is empty."""
        self._restarted.add(candidate)


_KEEP_S: Final = 60.0
"""How long blocks are kept of a stream that is not looked up."""


class LogTails:
    """What was read of some streams' logs.

    Args:
        timeout_s: Longest time for one look-up.
    """

    def __init__(self, store: RedisStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._readers: dict[StreamId, LogReader] = {}
        self._asked_s: dict[StreamId, float] = {}
        self._reading = asyncio.Lock()

    async def lookup(
        self, chain: Sequence[BlockKey], stream_ids: Collection[StreamId]
    ) -> dict[tuple[StreamId, SharedTier], int]:
        """Count leading blocks of a chain that each stream's replica holds.

        Returns:
            Its blocks on gpu, and on gpu or cpu as tier cpu.

        Raises:
            StoreError: Redis is gone, or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._reading:
                readers = self._wanted(stream_ids, time.monotonic())
                while readers:
                    readers = await self._read(readers)
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {self._timeout_s:g} s") from exc
        counts: dict[tuple[StreamId, SharedTier], int] = {}
        for stream_id in stream_ids:
            held = self._readers[stream_id].blocks.copies
            either = Either(held["gpu"], held["cpu"])
            counts[stream_id, "gpu"] = leading(chain, held["gpu"], []) if chain else 0
            counts[stream_id, "cpu"] = leading(chain, either, []) if chain else 0
        return counts

    def _wanted(self, stream_ids: Collection[StreamId], now_s: float) -> dict[StreamId, LogReader]:
        for stream_id in stream_ids:
            self._asked_s[stream_id] = now_s
            self._readers.setdefault(stream_id, LogReader())
        for stream_id, asked_s in list(self._asked_s.items()):
            if now_s > asked_s + _KEEP_S:
                del self._asked_s[stream_id], self._readers[stream_id]
        return {stream_id: self._readers[stream_id] for stream_id in stream_ids}

    async def _read(self, readers: Mapping[StreamId, LogReader]) -> dict[StreamId, LogReader]:
        """Read one part of each log; return the streams of which more follows."""
        parts = await self._store.read_logs(readers, timeout_s=self._timeout_s)
        for stream_id, part in parts.items():
            readers[stream_id].begin(part)
            for entry in part.entries:
                readers[stream_id].apply(entry)
        return {id_: reader for id_, reader in readers.items() if not parts[id_].is_end}
