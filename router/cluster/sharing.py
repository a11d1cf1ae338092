"""This router's part in what routers share: with Redis while it is there, else without.

    with Redis      open -> what the others ordered and have in flight -> loops, until one fails
    without Redis   this router's own view -> a pause -> try again

Engines are followed in both cases, by `following`.

While Redis is there, loops run: notes of other routers, our notes, leases. Each loop ends with the
StoreError that ended it. `Sharing` then ends the others, goes on without Redis and connects again.
The loop that writes the index is in index_writer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from router.base.backoff import Backoff
from router.base.errors import EMPTIED, StoreError, StoreUnavailable
from router.base.messages import Left, PoolChanged, Registered, StreamId
from router.base.supervisor import described, first_of
from router.cluster.candidate_source import CandidateNames
from router.cluster.following import Following, SnapshotLoader
from router.cluster.index_writer import IndexWriter
from router.cluster.link import PAUSE_S, Link
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_connection import Subscription
from router.cluster.redis_store import RedisStore, StoreFacts
from router.cluster.shares import OrderShare, PoolShare, RecordShare
from router.index.cache_view import CacheView
from router.metrics import Metrics

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


logger = logging.getLogger(__name__)


_SWEEP_S: Final = 2.0
_POOLS_S: Final = 0.2
_LEAVE_S: Final = 0.5
_STEADY_S: Final = 3.0  # up for so long is no accident


class SharedState(Struct, frozen=True, kw_only=True):
    """What routers share besides the index, a part for each kind."""

    peers: Peers
    outbox: Outbox
    orders: OrderShare
    records: RecordShare
    pools: Sequence[PoolShare] = ()


class Sharing:
    """The router's part in shared state. `run` is its life; `link` says whether Redis is there.

    Args:
        names: What candidates are called among routers.
    """

    def __init__(
        self,
        store: RedisStore,
        shares: SharedState,
        *,
        caches: CacheView,
        names: CandidateNames,
        lease_s: float,
        metrics: Metrics,
    ) -> None:
        self.link = Link()
        self.facts: StoreFacts | None = None  # of the last connection
        self.num_attempts = 0  # to connect
        self.loader = SnapshotLoader(store)
        self.writer = IndexWriter(
            store,
            caches,
            router=shares.peers.name,
            pool_deltas=lambda: [delta for pool in shares.pools for delta in pool.take()],
        )
        self.store = store
        self._peers = shares.peers
        self._outbox = shares.outbox
        self._pools = shares.pools
        self._orders = shares.orders
        self._records = shares.records
        self._metrics = metrics
        self.following = Following(
            caches=caches, names=names, writer=self.writer, loader=self.loader, link=self.link
        )
        notes = self._peers.notes
        notes.register(Registered, lambda *_: self._orders.must_read.set())
        notes.register(PoolChanged, self._apply_to_pools, with_own=True)
        self.keeper = LeaseKeeper(
            store,
            self.writer,
            self._peers,
            self._outbox,
            lease_s=lease_s,
            further=tuple(pool.lister for pool in self._pools),
            on_held=self._held,
        )

    def state(self) -> dict[str, Any]:
        """Describe it for every view."""
        roles = {
            each.candidate: "leading" if each.is_writing else "direct"
            for each in self.writer.streams
        }
        return {
            "state": "shared" if self.link.is_up else "degraded",
            "reason": self.link.reason,
            "redis": _server(self.facts) if self.facts is not None else None,  # or was last
            "routers": self.keeper.num_routers if self.link.is_up else 1,  # this one included
            "roles": dict(sorted(roles.items())),
            "num_streams": {"leading": 0, "direct": 0} | Counter(roles.values()),
            "counts": {
                "outages": self.link.num_outages,
                "deltas_written": self.writer.num_deltas,
                "deltas_refused": self.writer.num_refused,
                "rewrites": self.writer.num_rewrites,
                "snapshots": self.loader.num_loads,
                "garbage": self.store.num_garbage + self._peers.notes.num_garbage,
            },
        }

    # -- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Share state while Redis is there, go on without while it is not, until cancelled."""
        backoff = Backoff(*PAUSE_S)
        logged = ""
        try:
            while True:
                try:
                    await self._share(backoff)
                except* StoreError as group:
                    self.link.went_down(first_of(group))
                except* Exception as group:  # a bug of ours; the side path ends no router
                    error, reason = first_of(group), described(group)
                    self._metrics.count_failure("redis")
                    if reason != logged:
                        logged = reason
                        logger.error("internal error", exc_info=_without_message(error))
                    self.link.went_down(f"internal error: {reason}")
                _heed_cancellation()
                self._go_on_without()
                await self.store.close()
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._leave()

    def _go_on_without(self) -> None:
        self.writer.pause()
        self.loader.cancel()
        for pool in self._pools:
            pool.went_down()
        self._outbox.resend()
        self._peers.expire(time.monotonic())

    async def _leave(self) -> None:
        """Release our leases, so that no router waits for them to expire, or misses us."""
        try:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    if self.link.is_up:
                        await self.store.leave(self.keeper.held)
                        await self.store.publish((Left(),))
        finally:
            await self.store.close()

    async def _share(self, backoff: Backoff) -> None:
        """Connect, read what the others have, and share until something fails.

        Raises:
            ExceptionGroup: of StoreError.
        """
        self.num_attempts += 1
        try:
            is_first = self.facts is None
            self.facts = facts = await self.store.open()
            if not is_first:  # a Redis that was emptied, or has an older snapshot
                self._records.store_responses_again()
            subscription = await self.store.subscribe()
        except StoreError as exc:
            raise ExceptionGroup("redis", [exc]) from exc
        try:
            await self._share_notes(subscription, facts, backoff)
        except StoreError as exc:
            raise ExceptionGroup("redis", [exc]) from exc
        finally:
            await subscription.close()

    async def _share_notes(
        self, subscription: Subscription, facts: StoreFacts, backoff: Backoff
    ) -> None:
        await self._orders.read()
        await self.join_routers()
        async with asyncio.TaskGroup() as tg:
            tg.create_task(read_notes(subscription, self._peers), name="redis: read")
            tg.create_task(subscription.watch(), name="redis: watch")
            tg.create_task(self.writer.run(), name="redis: write")
            notes = NotePublisher(self.store, self._outbox)
            tg.create_task(notes.run(), name="redis: publish")
            tg.create_task(self.keeper.run(facts.incarnation), name="redis: leases")
            tg.create_task(self.loader.run(), name="redis: snapshots")
            tg.create_task(self._orders.run(), name="redis: registry")
            tg.create_task(self._records.store_sessions(), name="redis: sessions")
            tg.create_task(self._records.store_responses(), name="redis: responses")
            tg.create_task(self._sweep(), name="redis: sweep")
            for pool in self._pools:
                pool.came_up()
            if self._pools:
                tg.create_task(self._merge_pools(), name="redis: pool")
            self.link.came_up()
            await asyncio.sleep(_STEADY_S)
            self.link.steady()
            backoff.reset()
            await asyncio.Event().wait()  # for ever: the group must not be left before it fails

    async def join_routers(self) -> None:
        """Read what the other routers have in flight."""
        self._peers.join(await self.store.loads(), time.monotonic())

    async def _merge_pools(self) -> None:
        """Merge directories with what Redis has, as models are found."""
        while True:
            for pool in self._pools:
                await pool.join(self.store)
            await asyncio.sleep(_POOLS_S)

    def _apply_to_pools(self, note: PoolChanged, router: str, now_s: float) -> None:
        for pool in self._pools:
            pool.apply(note)

    def _held(self, held: frozenset[StreamId] | None) -> None:
        for pool in self._pools:
            pool.held(held)

    async def _sweep(self) -> None:
        """Free what retired epochs left in Redis; one router does it at a time."""
        while True:
            await self.store.sweep()
            await asyncio.sleep(_SWEEP_S)


def _server(facts: StoreFacts) -> str:
    return f"{facts.server} {facts.version} at {facts.address}"


def _heed_cancellation() -> None:
    """Raise a cancellation again that came with a failure.

    Before Python 3.13 a task group that is cancelled while one of its tasks fails raises the
    failure only, and a loop that goes on after it would never end. The count of cancellations is
    true only if the failure met the group's body: one that met its exit leaves its own behind.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _without_message(error: BaseException) -> BaseException:
    """Return an error with the place where it happened, without what it was about."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
