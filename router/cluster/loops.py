"""What runs while Redis is there, one loop each: notes of other routers, our notes, leases.

Each loop ends with the StoreError that ended it. `Sharing` then ends the others, goes on without
Redis and connects again. The loop that writes the index is in index_writer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from router.base.errors import EMPTIED, StoreFull, StoreUnavailable
from router.base.messages import Consumed, StreamId
from router.cluster.index_writer import FLUSH_S, IndexWriter
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore

logger = logging.getLogger(__name__)

_GATHER_S: Final = 0.002  # notes of requests that begin together go together

USAGE_S: Final = 0.1
"""Pause between two notes of what tenants used."""

_READ_S: Final = 1.0  # one blocking read: silence for so long is no failure
_FULL_PAUSE_S: Final = 1.0  # a full Redis is not asked more often
_HURRY_S: Final = 0.05  # how soon the lease of a new stream is asked for


async def read_notes(store: RedisStore, peers: Peers, after: str) -> None:
    """Apply the notes behind an id, for ever.

    Raises:
        StoreError: Redis is gone or cannot be used.
    """
    while True:
        found, after = await store.read_notes(after, block_s=_READ_S)
        for packed in found:
            peers.receive(packed, time.monotonic())
        await asyncio.sleep(0)


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
            StoreError: Redis is gone or cannot be used.
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
        notes, later = self._outbox.take(), self._outbox.take_later()
        try:
            for entry in filter(None, (notes, later)):
                await self._store.publish(entry)
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
        StoreError: Redis is gone or cannot be used.
    """
    while True:
        note = take(time.monotonic())
        if note is not None:
            with suppress(StoreFull):  # the next one has it all
                await store.publish((note,))
        await asyncio.sleep(USAGE_S)


class LeaseKeeper:
    """Sends heartbeats, and holds leases: of the streams that can be written here, of pools.

    Args:
        store: Where the leases are.
        writer: Writes the streams whose lease this router holds.
        peers: The other routers; silent ones are removed.
        outbox: What this router has in flight.
        lease_s: How long a lease lasts.
        further: Other leases.
        on_held: Takes the leases that are ours now.
    """

    def __init__(
        self,
        store: RedisStore,
        writer: IndexWriter,
        peers: Peers,
        outbox: Outbox,
        *,
        lease_s: float,
        further: tuple[StreamId, ...],
        on_held: Callable[[frozenset[StreamId]], None],
    ) -> None:
        self._store = store
        self._writer = writer
        self._peers = peers
        self._outbox = outbox
        self._beat_s = lease_s / 6
        self._further = further
        self._on_held = on_held
        self._asked: frozenset[StreamId] = frozenset()
        self.held: frozenset[StreamId] = frozenset()
        self.num_routers = 1

    async def run(self, incarnation: str) -> None:
        """Beat, renew and acquire, six times per lease, for ever.

        Raises:
            StoreError: Redis is gone, cannot be used, or was emptied.
        """
        while True:
            await self.beat(incarnation)
            await self._pause()

    async def beat(self, incarnation: str) -> None:
        """Send one heartbeat, renew our leases and take free ones."""
        beat = await self._store.beat(self._outbox.load(time.monotonic()))
        if beat.incarnation != incarnation:
            raise StoreUnavailable(EMPTIED)
        self.num_routers = len(beat.routers)
        if self._peers.wanted():
            self._peers.join(await self._store.loads(), time.monotonic())
        self._asked = frozenset(self._writer.wanted())
        self.held = await self._store.hold([*self._asked, *self._further])
        heads = await self._store.heads() if self._writer.needs_heads(self.held) else {}
        self._writer.update(self._asked, self.held, heads)
        self._on_held(self.held)
        self._outbox.alive()
        self._peers.expire(time.monotonic())

    async def _pause(self) -> None:
        """Wait for the next beat, less if there is a new stream."""
        until_s = time.monotonic() + self._beat_s
        while time.monotonic() < until_s:
            await asyncio.sleep(min(_HURRY_S, self._beat_s))
            if not self._asked.issuperset(self._writer.wanted()):
                return
