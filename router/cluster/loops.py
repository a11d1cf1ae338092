"""What runs while Redis is there, one loop each: notes of other routers, our notes, leases.

Each loop ends with the StoreError that ended it. `Sharing` then ends the others, goes on without
Redis and connects again. The loop that writes the index is in index_writer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from router.base.errors import EMPTIED, StoreUnavailable
from router.base.messages import StreamId
from router.cluster.index_writer import IndexWriter
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_connection import Subscription
from router.cluster.redis_store import RedisStore

BURST_S: Final = 0.002
"""Shortest pause between two messages: requests that begin within it travel together. The first one
after a pause goes at once (docs/research/scale.md)."""

_SLICE_S: Final = 0.004  # longest time to apply notes before requests get a turn
_HURRY_S: Final = 0.05  # how soon the lease of a new stream is asked for


async def read_notes(notes: Subscription, peers: Peers) -> None:
    """Apply the notes that come, for ever.

    Raises:
        StoreError: Redis is gone or cannot be used.
    """
    until_s = 0.0
    while True:
        packed = await notes.next()
        now_s = time.monotonic()
        peers.receive(packed, now_s)
        if now_s > until_s:  # reading what is there already does not wait
            await asyncio.sleep(0)
            until_s = time.monotonic() + _SLICE_S


class NotePublisher:
    """Publishes what is in flight here: at once that a request began, the rest a little later."""

    def __init__(self, store: RedisStore, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self._is_due = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0  # when it ends: uvloop's handles of short waits do not say
        self._last_s = 0.0  # when notes were published, by the loop's clock

    async def run(self) -> None:
        """Publish for ever; while nothing happens, nothing runs.

        Raises:
            StoreError: Redis is gone or cannot be used.
        """
        self._outbox.on_note = self._noted
        try:
            while True:
                await self._publish()
                await self._is_due.wait()
        finally:
            self._outbox.on_note = lambda wait_s: None
            self._cancel_timer()

    async def _publish(self) -> None:
        self._cancel_timer()
        self._is_due.clear()
        self._last_s = asyncio.get_running_loop().time()
        notes = (*self._outbox.take(), *self._outbox.take_later())
        if notes:
            await self._store.publish(notes)

    def _noted(self, wait_s: float) -> None:
        if self._is_due.is_set():
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due_s = max(now_s + wait_s, self._last_s + BURST_S)
        if due_s <= now_s:
            self._is_due.set()
        elif self._timer is None or due_s < self._due_s:
            self._cancel_timer()
            self._timer, self._due_s = loop.call_at(due_s, self._is_due.set), due_s

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
