"""What runs while Redis is there, one loop each: reading, writing, publishing, holding leases.

Each loop ends with the StoreError that ended it; `Sharing` then ends the others, goes on without
Redis and begins anew. Nothing else may end them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from router.cluster.membership import Membership, Memberships, Role
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_log import Cursor
from router.cluster.redis_store import RedisStore, Written
from router.errors import EMPTIED, StoreFull, StoreUnavailable
from router.messages import Consumed, Delta, Notes, Registered, StreamId

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.005
"""Deltas of so long go together, and notes of first tokens and ends: Redis has little to do."""

_GATHER_S: Final = 0.002  # notes of requests that begin together go together

USAGE_S: Final = 0.1
"""Between two notes of what tenants used: so old is what routers know of one another's."""

_READ_S: Final = 1.0  # one blocking read: silence for so long is no failure
_SLICE_S: Final = 0.004  # longest time to apply what was read before requests get a turn
_FULL_PAUSE_S: Final = 1.0  # a full Redis is not asked more often
_HURRY_S: Final = 0.05  # between beats while something waits for one


class LogReader:
    """Reads the log and the work stream from a cursor on."""

    def __init__(
        self,
        store: RedisStore,
        memberships: Memberships,
        peers: Peers,
        *,
        me: str,
        on_registered: Callable[[], None],
        on_pool: Callable[[Delta], None],
        on_consumed: Callable[[str, Consumed, float], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._memberships = memberships
        self._peers = peers
        self._me = me
        self._on_registered = on_registered
        self._on_pool = on_pool
        self._on_consumed = on_consumed
        self.num_deltas = 0
        self.num_gaps = 0

    async def run(self, cursor: Cursor) -> None:
        """Apply what comes, for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        while True:
            reading = await self._store.read(cursor, block_s=_READ_S)
            cursor = reading.cursor
            if reading.is_gap:
                cursor = await self._after_gap(cursor)
            for notes in reading.notes:  # first: they are few, and load is old in no time
                self._apply(notes)
            until_s = time.monotonic() + _SLICE_S
            for delta in reading.deltas:
                self._memberships.receive(delta)
                self._on_pool(delta)
                self.num_deltas += 1
                if time.monotonic() >= until_s:
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + _SLICE_S

    async def _after_gap(self, cursor: Cursor) -> Cursor:
        """Load anew what others lead: entries are gone that were never read.

        Raises:
            StoreUnavailable: not some are gone but all: Redis was emptied.
        """
        self.num_gaps += 1
        tail = (await self._store.snapshot(())).cursor
        if tail.incarnation != cursor.incarnation:
            raise StoreUnavailable(EMPTIED)
        logger.warning("redis log: entries were lost, loading again")
        self._memberships.reload()
        return tail

    def _apply(self, notes: Notes) -> None:
        if notes.router == self._me:
            return
        self._peers.apply(notes, time.monotonic())
        if any(isinstance(note, Registered) for note in notes.notes):
            self._on_registered()
        for note in notes.notes:
            if isinstance(note, Consumed):
                self._on_consumed(notes.router, note, time.monotonic())


class DeltaWriter:
    """Writes what changed in the streams we lead, and in what we know of the pool."""

    def __init__(
        self, store: RedisStore, memberships: Memberships, pool_deltas: Callable[[], list[Delta]]
    ) -> None:
        self._store = store
        self._memberships = memberships
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
        """Write one delta of each stream that has something to publish; return how many."""
        batch: list[tuple[Membership | None, Delta]] = []
        for member in self._memberships:
            delta = self._memberships.next_delta(member) if member.role is Role.LEADING else None
            if delta is not None:
                batch.append((member, delta))
        batch += [(None, delta) for delta in self._memberships.tombstones]
        self._memberships.tombstones.clear()
        batch += [(None, delta) for delta in self._pool_deltas()]
        if not batch:
            return 0
        deltas = [delta for _, delta in batch]
        results = await self._store.write(deltas)
        for (leader, delta), result in zip(batch, results, strict=True):
            self._note_result(leader, delta, result)
        self._note_room(deltas, results)
        return len(results)

    def _note_result(self, member: Membership | None, delta: Delta, result: Written) -> None:
        if result is Written.OK:
            self.num_deltas += 1
        else:
            self.num_refused += 1
        publication = member.publication if member is not None else None
        if member is None or publication is None or publication.pending is not delta:
            return
        match result:
            case Written.OK:
                publication.acknowledge()
            case Written.NO_ROOM:
                publication.no_room()
            case _:
                if result is Written.LOST and not self.is_full:  # full: half of a large delta
                    logger.warning(
                        "redis lost what was written", extra={"candidate": member.candidate}
                    )
                self._memberships.step_down(member)

    def _note_room(self, deltas: list[Delta], results: list[Written]) -> None:
        """Note that Redis is full, or that it took what needs room."""
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


class NotePublisher:
    """Publishes what is in flight here: at once that a request began, the rest within `FLUSH_S`."""

    def __init__(self, store: RedisStore, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Publish for ever; while nothing happens, nothing runs.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        self._outbox.on_note = self._noted
        try:
            while True:
                await self._publish()
                await asyncio.sleep(_GATHER_S)
                await self._is_due.wait()
        finally:
            self._outbox.on_note = lambda is_urgent: None
            self._cancel_timer()

    async def _publish(self) -> None:
        self._cancel_timer()
        self._is_due.clear()
        notes = self._outbox.take()
        if notes:
            try:
                await self._store.publish(notes)
            except StoreFull as exc:
                logger.debug("notes not published", extra={"reason": exc.message})
                self._outbox.resend()
                await asyncio.sleep(_FULL_PAUSE_S)

    def _noted(self, is_urgent: bool) -> None:
        if is_urgent:
            self._is_due.set()
        elif self._timer is None and not self._is_due.is_set():
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._is_due.set)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def publish_usage(store: RedisStore, take: Callable[[float], Consumed | None]) -> None:
    """Publish what tenants used here, for ever.

    Raises:
        StoreError: Redis is gone or will not do.
    """
    while True:
        note = take(time.monotonic())
        if note is not None:
            with suppress(StoreFull):  # the next one has it all
                await store.publish((note,))
        await asyncio.sleep(USAGE_S)


class LeaseKeeper:
    """Sends heartbeats, and holds the leases of what this router leads."""

    def __init__(
        self,
        store: RedisStore,
        memberships: Memberships,
        peers: Peers,
        outbox: Outbox,
        *,
        lease_s: float,
        further: tuple[StreamId, ...],
        on_held: Callable[[frozenset[StreamId]], None],
    ) -> None:
        self._store = store
        self._memberships = memberships
        self._peers = peers
        self._outbox = outbox
        self._beat_s = lease_s / 6
        self._further = further
        self._on_held = on_held
        self.held: frozenset[StreamId] = frozenset()
        self.num_routers = 1

    async def run(self, incarnation: str) -> None:
        """Beat, renew and acquire, six times per lease, for ever.

        Raises:
            StoreError: Redis is gone, will not do, or has lost everything (flushed).
        """
        while True:
            now_s = time.monotonic()
            beat = await self._store.beat(self._outbox.load(now_s))
            if beat.incarnation != incarnation:
                raise StoreUnavailable(EMPTIED)
            self.num_routers = len(beat.routers)
            if self._peers.wanted():
                self._peers.join(await self._store.loads(), time.monotonic())
            is_settled = await self._hold()
            self._outbox.alive()
            self._peers.expire(time.monotonic())
            await self._pause(is_settled)

    async def _hold(self) -> bool:
        """Renew our leases, take free ones, and lead accordingly; True: nothing is left to do."""
        wanted = [member.stream_id for member in self._memberships]
        self.held = await self._store.hold([*wanted, *self._further])
        must_read = any(
            member.stream_id in self.held and member.role is not Role.LEADING
            for member in self._memberships
        )
        heads = await self._store.heads() if must_read else {}
        is_settled = self._memberships.reconcile(self.held, heads)
        self._on_held(self.held)
        return is_settled

    async def _pause(self, is_settled: bool) -> None:
        """Wait for the next beat; less while something has to be taken over, or is new."""
        known = {member.stream_id for member in self._memberships}
        until_s = time.monotonic() + self._beat_s
        while time.monotonic() < until_s:
            await asyncio.sleep(min(_HURRY_S, self._beat_s))
            if not is_settled or {member.stream_id for member in self._memberships} != known:
                return
