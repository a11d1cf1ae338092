"""Writes to Redis what the engines' caches hold, for the streams whose lease this router has.

Every router follows every engine itself. One of them, by a lease on each stream, also writes what
changed, so that a router that starts later begins with the blocks that engines cannot replay.

    the lease is    and Redis has                       this router writes
    ours            what we loaded, or wrote last       what changed since
    ours            anything else                       everything: a clear, the blocks, the changes
    another's       -                                   nothing
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from policies.view import CandidateId
from router.base.messages import (
    Delta,
    PoolChanged,
    StreamHead,
    StreamId,
    StreamStatus,
    TierChange,
)
from router.cluster.redis_store import RedisStore, Written
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.journal import Changes
from router.kv_events.stream import RankStream

logger = logging.getLogger(__name__)

CHUNK_BLOCKS: Final = 8_192
"""Blocks in one delta at most: 64 KiB."""

FLUSH_S: Final = 0.25
"""Pause between two writes; changes in between are written together. A router that starts reads the
rest from the engine, which keeps its last batches for minutes."""

MAX_OLD: Final = 65_536
"""Keys in a log beyond twice the blocks that are held: then it begins again."""

_FULL_PAUSE_S: Final = 1.0  # a full Redis is not asked more often

_UNCHANGED: Final = Changes()


class StreamWriter:
    """What has to be written of one stream.

    A delta stays `pending` until Redis has confirmed it. A delta without confirmation is written
    again, which does no harm.

    Args:
        stream_id: The stream's name among routers.
        candidate: Its name here.
        index: Where its blocks are.
        router: This router's name.
    """

    __slots__ = (
        "_base",
        "_contents",
        "_index",
        "_last_status",
        "_router",
        "candidate",
        "is_writing",
        "num_logged",
        "num_rewrites",
        "pending",
        "stream_id",
    )

    def __init__(
        self, stream_id: StreamId, candidate: CandidateId, index: BlockIndex, *, router: str
    ) -> None:
        self.stream_id = stream_id
        self.candidate = candidate
        self.is_writing = False
        self.pending: Delta | None = None
        self.num_rewrites = 0
        self.num_logged = 0  # keys in Redis' log, with repetitions
        self._index = index
        self._router = router
        self._base: StreamHead | None = None  # in Redis, and the journal has all changes since
        self._contents: Iterator[TierChange] | None = None  # what a rewrite has still to write
        self._last_status: StreamStatus | None = None  # in Redis

    def loaded(self, head: StreamHead, num_logged: int = 0) -> None:
        """Record changes from here on: the index has what Redis has at `head`, or more."""
        self._base = head
        self.num_logged = num_logged
        self._index.journal(self.candidate, True)

    def start(self, head: StreamHead | None) -> None:
        """Start to write: the lease is ours, and `head` is in Redis."""
        self.is_writing = True
        is_rewrite = not self._continues(head)
        if is_rewrite:
            self._begin_rewrite()
        logger.info(
            "this router writes the replica's cache contents to redis",
            extra={"candidate": self.candidate, "rewrite": is_rewrite},
        )

    def pause(self) -> None:
        """Stop to write while Redis is gone or history is read; changes are noted for a while."""
        self.is_writing = False

    def stop(self) -> None:
        """Stop to write: another router does."""
        self.is_writing = False
        self.pending = self._base = self._contents = self._last_status = None
        self._index.journal(self.candidate, False)

    def next_delta(self, stream: RankStream) -> Delta | None:
        """Return the next delta; None: nothing changed. The same until it is confirmed."""
        if self.pending is None:
            self.pending = self._next_delta(stream)
        return self.pending

    def confirm(self) -> None:
        """Record that Redis has the pending delta."""
        delta, self.pending = self.pending, None
        assert delta is not None
        if delta.cleared:
            self.num_logged = 0
        self.num_logged += (
            sum(len(change.stored) + len(change.removed) for change in delta.changes) // 8
        )
        if delta.position is not None:
            self._base = StreamHead(position=delta.position, writer=self._router)
        elif delta.cleared:
            self._base = None
        self._last_status = delta.status or self._last_status

    def no_room(self) -> None:
        """Redis has no room for the pending delta: free the stream's log, and write it later.

        What is gone must not be credited to the replica. While a log is begun again there is no
        position, so no router starts from it.
        """
        if self._contents is None:
            self._begin_rewrite()

    @property
    def is_behind(self) -> bool:
        """Whether more is to be written at once."""
        return self.is_writing and (
            self._contents is not None or self._index.num_pending(self.candidate) >= CHUNK_BLOCKS
        )

    def _continues(self, head: StreamHead | None) -> bool:
        """Return whether Redis has the base, or the pending delta after it."""
        base, sent = self._base, self.pending
        if base is None or head is None or base.position is None:
            return False
        is_sent = sent is not None and sent.position == head.position
        if is_sent and head.writer == self._router:
            self.confirm()
            return True
        return (head.position, head.writer) == (base.position, base.writer)

    def _next_delta(self, stream: RankStream) -> Delta | None:
        if self._contents is not None:
            change = next(self._contents, None)
            if change is not None:
                return Delta(stream_id=self.stream_id, changes=(change,), newest=stream.position)
            self._contents = self._last_status = None  # a rewrite ends with status and position
        changes = self._index.take_changes(self.candidate, CHUNK_BLOCKS) or _UNCHANGED
        if changes.is_lost:
            self._begin_rewrite()
            return self.pending
        if self.num_logged > 2 * self._num_held() + MAX_OLD:
            self._begin_again()
            return self.pending
        status = stream.status()
        if changes is _UNCHANGED and status == self._last_status:
            return None
        return Delta(
            stream_id=self.stream_id,
            cleared=changes.cleared,
            changes=changes.changes,
            position=stream.position if changes.is_whole else None,
            newest=stream.position,
            status=status if status != self._last_status else None,
        )

    def _num_held(self) -> int:
        index, candidate = self._index, self.candidate
        return index.num_blocks(candidate) + index.num_blocks(candidate, "cpu")

    def _begin_rewrite(self) -> None:
        self.num_rewrites += 1
        self._begin_again()

    def _begin_again(self) -> None:
        self._base = None
        self._index.journal(self.candidate, True)
        self._contents = self._index.contents(self.candidate, CHUNK_BLOCKS)
        self.pending = Delta(stream_id=self.stream_id, cleared=True)


class IndexWriter:
    """All streams that this router follows, and what it writes of them.

    Args:
        store: Where they are written.
        caches: Where their blocks and streams are.
        router: This router's name.
        pool_deltas: Returns what was learned of the pools since the last call; needs no lease.
    """

    def __init__(
        self,
        store: RedisStore,
        caches: CacheView,
        *,
        router: str,
        pool_deltas: Callable[[], list[Delta]] = list,
    ) -> None:
        self._store = store
        self._caches = caches
        self._router = router
        self._pool_deltas = pool_deltas
        self._streams: dict[StreamId, StreamWriter] = {}
        self._num_old_rewrites = 0
        self._has_begun = asyncio.Event()  # to write a stream
        self.num_deltas = 0
        self.num_refused = 0
        self.is_full = False

    @property
    def streams(self) -> list[StreamWriter]:
        """The streams of all candidates with events."""
        return list(self._streams.values())

    @property
    def num_rewrites(self) -> int:
        """Count how often a stream was written as a whole."""
        return self._num_old_rewrites + sum(each.num_rewrites for each in self.streams)

    def add(self, stream_id: StreamId, candidate: CandidateId) -> StreamWriter:
        """Add a stream that this router begins to follow."""
        stream = StreamWriter(stream_id, candidate, self._caches.index, router=self._router)
        self._streams[stream_id] = stream
        return stream

    def remove(self, stream: StreamWriter) -> None:
        """Remove a stream that this router follows no longer."""
        stream.stop()
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]
            self._num_old_rewrites += stream.num_rewrites

    def wanted(self) -> list[StreamId]:
        """List the streams this router can write: it has read what the engine can replay."""
        return [each.stream_id for each in self.streams if self._stream_of(each) is not None]

    def needs_heads(self, held: frozenset[StreamId]) -> bool:
        """Return whether `update` will start to write a stream."""
        return any(each.stream_id in held and not each.is_writing for each in self.streams)

    def update(
        self,
        asked: frozenset[StreamId],
        held: frozenset[StreamId],
        heads: Mapping[StreamId, StreamHead],
    ) -> None:
        """Write the streams that are held, and no other; `heads` is what Redis has of each."""
        for each in self.streams:
            if each.stream_id in held:
                if not each.is_writing:
                    each.start(heads.get(each.stream_id))
                    self._has_begun.set()
            elif each.stream_id in asked:
                each.stop()
            elif each.is_writing:  # its history is being read again: the lease is still ours
                each.pause()

    def pause(self) -> None:
        """Write nothing: Redis is gone."""
        for each in self.streams:
            each.pause()

    async def run(self) -> None:
        """Write for ever.

        Raises:
            StoreError: Redis is gone or cannot be used.
        """
        while True:
            num_written = await self.flush()
            if self.is_full:
                await asyncio.sleep(_FULL_PAUSE_S)
            else:
                is_behind = num_written and any(each.is_behind for each in self.streams)
                await (asyncio.sleep(0) if is_behind else self._pause())

    async def _pause(self) -> None:
        """Wait for the next write; a stream that begins to be written does not wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._has_begun.wait()
        self._has_begun.clear()

    async def flush(self) -> int:
        """Write one delta of each stream that changed; return how many."""
        batch: list[tuple[StreamWriter | None, Delta]] = []
        for each in self.streams:
            stream = self._caches.stream(each.candidate)
            if each.is_writing and isinstance(stream, RankStream):
                delta = each.next_delta(stream)
                if delta is not None:
                    batch.append((each, delta))
        pools = self._pool_deltas()
        batch += [(None, delta) for delta in pools]
        if not batch:
            return 0
        deltas = [delta for _, delta in batch]
        results = await self._store.write(deltas)
        if pools:
            notes = [
                PoolChanged(delta.stream_id, change) for delta in pools for change in delta.changes
            ]
            await self._store.publish(notes)
        for (writer, delta), result in zip(batch, results, strict=True):
            self._note_result(writer, delta, result)
        self._note_room(deltas, results)
        return len(results)

    def _note_result(self, writer: StreamWriter | None, delta: Delta, result: Written) -> None:
        if result is Written.OK:
            self.num_deltas += 1
        else:
            self.num_refused += 1
        if writer is None or writer.pending is not delta:
            return
        match result:
            case Written.OK:
                writer.confirm()
            case Written.NO_ROOM:
                writer.no_room()
            case Written.FENCED:
                writer.stop()

    def _note_room(self, deltas: list[Delta], results: list[Written]) -> None:
        """Log that Redis is full, or that it accepts new blocks again."""
        if Written.NO_ROOM in results:
            if not self.is_full:
                logger.error("redis is full: the shared index is not updated; raise maxmemory")
            self.is_full = True
        elif self.is_full and any(
            result is Written.OK and any(change.stored for change in delta.changes)
            for delta, result in zip(deltas, results, strict=True)
        ):
            logger.info("redis accepts writes again")
            self.is_full = False

    def _stream_of(self, writer: StreamWriter) -> RankStream | None:
        """Return the candidate's stream if its history is read."""
        stream = self._caches.stream(writer.candidate)
        return stream if isinstance(stream, RankStream) and stream.is_read else None
