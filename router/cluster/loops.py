"""What runs while Redis is there: reading, telling, and keeping leases. One loop each.

Each loop ends with the StoreError that ended it; `Sharing` then ends the others, goes on alone and
begins anew. Nothing else may end them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from router.cluster.leadership import Feed, Role, SharedFeeds
from router.cluster.peers import Peers
from router.cluster.redis_log import Cursor
from router.cluster.redis_store import RedisStore, Written
from router.errors import EMPTIED, StoreFull, StoreUnavailable
from router.messages import Consumed, Delta, FeedId, Notes, Registered

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.005
"""Deltas and notes of so long go together: what an engine or a request does in that time is not
known to other routers anyway, and Redis has little to do with them."""

USAGE_S: Final = 0.1
"""Between two notes of what tenants used: for so long routers do not know of one another's."""

_READ_S: Final = 1.0  # one blocking read: silence for so long is no failure
_SLICE_S: Final = 0.004  # longest time to apply what was read before requests get a turn
_FULL_PAUSE_S: Final = 1.0  # a full Redis is not asked more often
_HURRY_S: Final = 0.05  # between beats while something waits for one


class Reader:
    """Reads the log and the work stream from a cursor on."""

    def __init__(
        self,
        store: RedisStore,
        feeds: SharedFeeds,
        peers: Peers,
        *,
        me: str,
        on_registered: Callable[[], None],
        on_pool: Callable[[Delta], None],
        on_consumed: Callable[[str, Consumed, float], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._peers = peers
        self._me = me
        self._on_registered = on_registered
        self._on_pool = on_pool
        self._on_consumed = on_consumed
        self.num_deltas = 0
        self.num_gaps = 0

    async def run(self, cursor: Cursor) -> None:
        """Read for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        while True:
            reading = await self._store.read(cursor, block_s=_READ_S)
            cursor = reading.cursor
            if reading.is_gap:
                cursor = await self._after_gap(cursor)
            for notes in reading.notes:  # first: they are few, and load is old in no time
                self._hear(notes)
            until_s = time.monotonic() + _SLICE_S
            for delta in reading.deltas:
                self._feeds.heard(delta)
                self._on_pool(delta)
                self.num_deltas += 1
                if time.monotonic() >= until_s:
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + _SLICE_S

    async def _after_gap(self, cursor: Cursor) -> Cursor:
        """Load anew what others feed: entries are gone that were never read.

        Raises:
            StoreUnavailable: not some are gone but all: Redis was emptied.
        """
        self.num_gaps += 1
        tail = (await self._store.snapshot(())).cursor
        if tail.incarnation != cursor.incarnation:
            raise StoreUnavailable(EMPTIED)
        logger.warning("redis log: entries were lost, loading anew")
        self._feeds.gap()
        return tail

    def _hear(self, notes: Notes) -> None:
        if notes.router == self._me:
            return
        self._peers.apply(notes, time.monotonic())
        if any(isinstance(note, Registered) for note in notes.notes):
            self._on_registered()
        for note in notes.notes:
            if isinstance(note, Consumed):
                self._on_consumed(notes.router, note, time.monotonic())


class Writer:
    """Writes what changed in the feeds we lead, and in what we know of the pool."""

    def __init__(
        self, store: RedisStore, feeds: SharedFeeds, pool_deltas: Callable[[], list[Delta]]
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._pool_deltas = pool_deltas
        self.num_deltas = 0
        self.num_refused = 0
        self.is_full = False

    async def run(self) -> None:
        """Write for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        while True:
            num_written = await self.flush()
            if self.is_full:
                await asyncio.sleep(_FULL_PAUSE_S)
            else:
                await asyncio.sleep(0 if num_written else FLUSH_S)

    async def flush(self) -> int:
        """Write one delta of each feed that has something to tell; return how many."""
        told: list[tuple[Feed | None, Delta]] = []
        for feed in self._feeds:
            delta = self._feeds.next_delta(feed) if feed.role is Role.LEADING else None
            if delta is not None:
                told.append((feed, delta))
        told += [(None, delta) for delta in self._feeds.farewells]
        self._feeds.farewells.clear()
        told += [(None, delta) for delta in self._pool_deltas()]
        if not told:
            return 0
        results = await self._store.write([delta for _, delta in told])
        for (leader, delta), result in zip(told, results, strict=True):
            self._note(leader, delta, result)
        self._note_room([delta for _, delta in told], results)
        return len(results)

    def _note(self, feed: Feed | None, delta: Delta, result: Written) -> None:
        if result is Written.OK:
            self.num_deltas += 1
            if feed is not None and feed.unacked is delta:
                self._feeds.acknowledge(feed)
            return
        self.num_refused += 1
        if feed is None or feed.unacked is not delta:
            return
        if result is Written.NO_ROOM:
            self._feeds.no_room(feed)
            return
        if result is Written.LOST and not self.is_full:  # full, it may have half of a large delta
            logger.warning("redis lost what was written", extra={"candidate": feed.candidate})
        self._feeds.lose(feed)

    def _note_room(self, deltas: list[Delta], results: list[Written]) -> None:
        """Notice that Redis is full; that it is not shows in what it takes that needs room."""
        if Written.NO_ROOM in results:
            if not self.is_full:
                logger.error("redis is full: the shared index is not kept up (see maxmemory)")
            self.is_full = True
        elif self.is_full and any(
            result is Written.OK and any(change.stored for change in delta.changes)
            for delta, result in zip(deltas, results, strict=True)
        ):
            logger.info("redis has room again")
            self.is_full = False


async def tell(store: RedisStore, peers: Peers) -> None:
    """Tell the others what is in flight here, for ever.

    Raises:
        StoreError: Redis is gone or will not do.
    """
    while True:
        notes = peers.take()
        if notes:
            try:
                await store.tell(notes)
            except StoreFull as exc:
                logger.debug("notes not told", extra={"reason": exc.message})
                peers.lost()
                await asyncio.sleep(_FULL_PAUSE_S)
        await asyncio.sleep(FLUSH_S)


async def tell_usage(store: RedisStore, take: Callable[[float], Consumed | None]) -> None:
    """Tell the others what tenants used here, for ever.

    Raises:
        StoreError: Redis is gone or will not do.
    """
    while True:
        note = take(time.monotonic())
        if note is not None:
            with suppress(StoreFull):  # the next one says it all
                await store.tell((note,))
        await asyncio.sleep(USAGE_S)


class Keeper:
    """Keeps our leases, and lets the others know that we live."""

    def __init__(
        self,
        store: RedisStore,
        feeds: SharedFeeds,
        peers: Peers,
        *,
        lease_s: float,
        further: tuple[FeedId, ...],
        on_held: Callable[[frozenset[FeedId]], None],
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._peers = peers
        self._beat_s = lease_s / 6
        self._further = further
        self._on_held = on_held
        self.held: frozenset[FeedId] = frozenset()
        self.num_routers = 1

    async def run(self, incarnation: str) -> None:
        """Renew and acquire, a few times per lease, for ever.

        Raises:
            StoreError: Redis is gone, will not do, or has lost everything (flushed).
        """
        while True:
            now_s = time.monotonic()
            beat = await self._store.beat(self._peers.load(now_s))
            if beat.incarnation != incarnation:
                raise StoreUnavailable(EMPTIED)
            self.num_routers = len(beat.routers)
            if self._peers.wanted():
                self._peers.join(await self._store.loads(), time.monotonic())
            is_settled = await self._hold()
            self._peers.alive()
            self._peers.expire(time.monotonic())
            await self._pause(is_settled)

    async def _hold(self) -> bool:
        """Renew our leases, take what is free, and act on it; True: nothing is left to do."""
        wanted = [feed.id for feed in self._feeds]
        self.held = await self._store.hold([*wanted, *self._further])
        must_look = any(f.id in self.held and f.role is not Role.LEADING for f in self._feeds)
        states = await self._store.feeds() if must_look else {}
        is_settled = self._feeds.deal(self.held, states)
        self._on_held(self.held)
        return is_settled

    async def _pause(self, is_settled: bool) -> None:
        """Wait for the next beat; less while something has to be taken over, or is new."""
        known = {feed.id for feed in self._feeds}
        until_s = time.monotonic() + self._beat_s
        while time.monotonic() < until_s:
            await asyncio.sleep(min(_HURRY_S, self._beat_s))
            if not is_settled or {feed.id for feed in self._feeds} != known:
                return
