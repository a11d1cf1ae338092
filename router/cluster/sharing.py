"""This router's part in the global index: together while Redis is there, alone while it is not.

    together   open -> what the others have ordered and in flight -> loops, until one fails
    alone      every engine followed directly, from where the log ended -> a pause -> try again

A watch asks `follow` to keep a candidate's blocks known, and does not see which way it goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Final, TypeVar

from policies.view import CandidateId
from router.backoff import Backoff
from router.cluster.candidate_names import Feeds
from router.cluster.candidate_source import CandidateSource
from router.cluster.leadership import Feed, Role, SharedFeeds
from router.cluster.link import PAUSE_S, Link
from router.cluster.loader import load
from router.cluster.loops import Keeper, Reader, Writer, tell, tell_usage
from router.cluster.peers import Peers
from router.cluster.pool_share import LISTER, PoolShare
from router.cluster.redis_store import RedisStore, StoreFacts
from router.cluster.shared_stream import SharedStream
from router.errors import StoreError, StoreFull
from router.experiments.trials import Trials
from router.index.cache_view import CacheView
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream
from router.messages import Registered, ReplicaRecord
from router.metrics import SharingState
from router.replicas.registry import Registry
from router.supervisor import described, ignore
from router.tenants import Accounts

logger = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=BaseException)

_SWEEP_S: Final = 2.0
_SESSIONS_S: Final = 1.0
_POOLS_S: Final = 0.2
_LEAVE_S: Final = 0.5
_DOUBT_S: Final = 1.0  # a doubt is told so often until it is gone
_ORDERS_S: Final = 0.1  # how soon an order given here is stored
_FULL_S: Final = 1.0  # how soon Redis is asked again for what it had no room for
_SETTLE_S: Final = 1.0  # nobody waits longer for Redis before going on alone
_STEADY_S: Final = 3.0  # up for so long is no accident


class Sharing:
    """See the module. `run` is its life; `link` says whether Redis is there.

    Args:
        me: This router's name among the others, unique to the process.
        feeds: What candidates are called among routers.
        apply_records: Makes the registry follow what is stored.
        trials: Experiments, shared as the registry is; None: there are none to share.
        accounts: What tenants used; None: there are none.
        keeps_blocks: Whether blocks that other routers feed are kept here (index.mode local).
    """

    def __init__(
        self,
        store: RedisStore,
        *,
        me: str,
        caches: CacheView,
        feeds: Feeds,
        peers: Peers,
        registry: Registry,
        apply_records: Callable[[Mapping[str, ReplicaRecord]], None],
        pool: PoolShare | None,
        lease_s: float,
        session_ttl_s: float,
        keeps_blocks: bool,
        trials: Trials | None = None,
        accounts: Accounts | None = None,
        count_failure: Callable[[str], None] = ignore,
    ) -> None:
        self.link = Link()
        self.facts: StoreFacts | None = None  # of the last connection
        self.num_attempts = 0  # to connect
        self.shared = SharedFeeds(caches, keeps_blocks=keeps_blocks)
        self._store = store
        self._caches = caches
        self._feeds = feeds
        self._peers = peers
        self._registry = registry
        self._apply_records = apply_records
        self._pool = pool
        self._trials = trials
        self._accounts = accounts
        self._count_failure = count_failure
        self._session_ttl_s = session_ttl_s
        self._must_read_registry = asyncio.Event()
        self.reader = Reader(
            store,
            self.shared,
            peers,
            me=me,
            on_registered=self._must_read_registry.set,
            on_pool=pool.apply if pool is not None else _ignore,
            on_consumed=accounts.receive if accounts is not None else _ignore,
        )
        self.writer = Writer(store, self.shared, pool.take if pool is not None else list)
        self.keeper = Keeper(
            store,
            self.shared,
            peers,
            lease_s=lease_s,
            further=(LISTER,) if pool is not None else (),
            on_held=pool.held if pool is not None else _ignore,
        )
        peers.on_doubted = self._doubted

    def state(self) -> SharingState:
        """Describe how we stand, for /metrics and the admin API."""
        roles = {feed.candidate: feed.role.name.lower() for feed in self.shared}
        num_feeds = Counter(roles.values())
        return SharingState(
            is_up=self.link.is_up,
            num_routers=self.keeper.num_routers if self.link.is_up else 1,
            num_feeds={name: num_feeds[name] for name in (role.name.lower() for role in Role)},
            counts={
                "outages": self.link.num_outages,
                "deltas_written": self.writer.num_deltas,
                "deltas_refused": self.writer.num_refused,
                "deltas_read": self.reader.num_deltas,
                "gaps": self.reader.num_gaps,
                "rewrites": self.shared.num_rewrites,
                "snapshots": self.shared.num_loads,
                "garbage": self._store.num_garbage,
            },
            reason=self.link.reason,
            redis=_told(self.facts) if self.facts is not None else None,
            roles=dict(sorted(roles.items())),
        )

    # -- for the watches ---------------------------------------------------------------------

    async def follow(self, source: CandidateSource) -> None:
        """Keep a candidate's blocks known, by the way that is open, until cancelled.

        Raises:
            ValueError, ConfigError: its event endpoint is none.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await self.link.settled.wait()
        id_ = self._feeds.feed_of(source.candidate)
        if id_ is None:  # removed meanwhile
            return
        feed = self.shared.join(id_, source.candidate, is_shared=self.link.is_up)
        try:
            while True:
                if feed.role is Role.FOLLOWING:
                    await self._follow_router(feed, source)
                else:
                    await self._follow_engine(feed, source)
        finally:
            self.shared.leave(feed)

    async def _follow_engine(self, feed: Feed, source: CandidateSource) -> None:
        """Follow the engine ourselves until another router tells us what it does."""
        events = source.events()
        known = self._caches.stream(feed.candidate)
        if isinstance(known, RankStream):
            stream = known
        else:
            stream = source.rank_stream()
            self._caches.hand_over(feed.candidate, stream)
            if isinstance(known, SharedStream) and known.position is not None:
                stream.resume(known.position, known.standing_now(), time.monotonic())
            else:  # there is no point in the engine's history to go on from
                self._caches.index.clear(feed.candidate)
        with closing(events):  # cancelled before its first step, nobody else would
            async with asyncio.TaskGroup() as tg:
                task = tg.create_task(follow(stream, events), name=f"events {feed.candidate}")
                while feed.role is not Role.FOLLOWING:
                    feed.changed.clear()
                    await feed.changed.wait()
                task.cancel()

    async def _follow_router(self, feed: Feed, source: CandidateSource) -> None:
        """Let the log tell, until the engine has to be followed."""
        stream = source.shared_stream()
        self._caches.hand_over(feed.candidate, stream)
        self.shared.settle(feed)
        while feed.role is Role.FOLLOWING:
            feed.changed.clear()
            await feed.changed.wait()

    def restarted(self, candidate: CandidateId) -> None:
        """Tell the others that a candidate's engine is another process now, and holds nothing."""
        id_ = self._feeds.feed_of(candidate)
        feed = self.shared.get(id_) if id_ is not None else None
        if feed is not None and feed.role is Role.LEADING:
            self.shared.end_epoch(feed)
        else:
            self._peers.doubted(candidate, "its engine restarted")

    # -- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Share state while Redis is there, go on alone while it is not, until cancelled."""
        backoff = Backoff(*PAUSE_S)
        logged = ""
        try:
            while True:
                try:
                    await self._share(backoff)
                except* StoreError as group:
                    self.link.went_down(_first(group))
                except* Exception as group:  # a bug of ours; the side path ends no router
                    error, reason = _first(group), described(group)
                    self._count_failure("redis")
                    if reason != logged:
                        logged = reason
                        logger.error("internal error", exc_info=_without_message(error))
                    self.link.went_down(f"internal error: {reason}")
                _heed_cancellation()
                self._go_alone()
                await self._store.close()
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._leave()

    def _go_alone(self) -> None:
        self.shared.go_alone()
        if self._pool is not None:
            self._pool.went_down()
        if self._accounts is not None:
            self._accounts.lost()
        self._peers.lost()
        self._peers.expire(time.monotonic())

    async def _leave(self) -> None:
        """Give our leases back, so that nobody has to wait for them to expire."""
        try:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    if self.link.is_up:
                        await self._store.leave(self.keeper.held)
        finally:
            await self._store.close()

    async def _share(self, backoff: Backoff) -> None:
        """Connect, learn what the others have, and share until something fails.

        Raises:
            ExceptionGroup: of StoreError.
        """
        self.num_attempts += 1
        try:
            self.facts = facts = await self._store.open()
            cursor = (await self._store.snapshot(())).cursor
            await self._read_registry()
            await self.join_routers()
        except StoreError as exc:
            raise ExceptionGroup("redis", [exc]) from exc
        async with asyncio.TaskGroup() as tg:
            tg.create_task(self.reader.run(cursor), name="redis: read")
            tg.create_task(self.writer.run(), name="redis: write")
            tg.create_task(tell(self._store, self._peers), name="redis: tell")
            tg.create_task(self.keeper.run(facts.incarnation), name="redis: leases")
            tg.create_task(load(self._store, self.shared), name="redis: snapshots")
            tg.create_task(self._keep_registry(), name="redis: registry")
            tg.create_task(self._keep_sessions(), name="redis: sessions")
            tg.create_task(self._keep_doubts(), name="redis: doubts")
            tg.create_task(self._sweep(), name="redis: sweep")
            if self._accounts is not None:
                tg.create_task(tell_usage(self._store, self._accounts.note), name="redis: usage")
            if self._pool is not None:
                self._pool.came_up()
                tg.create_task(self._join_pools(self._pool), name="redis: pool")
            self.link.came_up()
            await asyncio.sleep(_STEADY_S)
            self.link.steady()
            backoff.reset()
            await asyncio.Event().wait()  # for ever: the group must not be left before it fails

    async def join_routers(self) -> None:
        """Learn what the other routers have in flight."""
        self._peers.join(await self._store.loads(), time.monotonic())

    async def _keep_registry(self) -> None:
        """Store what is ordered here; read what was ordered elsewhere."""
        while True:
            try:
                await self._store_orders()
            except StoreFull:
                await asyncio.sleep(_FULL_S)
            try:
                async with asyncio.timeout(_ORDERS_S):
                    await self._must_read_registry.wait()
            except TimeoutError:
                continue
            self._must_read_registry.clear()
            await self._read_registry()

    async def _store_orders(self) -> None:
        for identity, record in list(self._registry.unsaved.items()):
            await self._store.put_replica(identity, record)
            self._registry.saved(identity, record)
            await self._store.tell((Registered(),))
        if self._trials is not None:
            experiments = self._trials.experiments
            for name, state in list(experiments.unsaved.items()):
                await self._store.put_experiment(name, state)
                experiments.saved(name, state)
                await self._store.tell((Registered(),))

    async def _read_registry(self) -> None:
        """Follow what was ordered elsewhere; what Redis has lost of it is stored again."""
        if self._trials is not None:
            states = await self._store.experiments()
            self._trials.apply(states)
            for name, state in self._trials.experiments.records.items():
                if name not in states:
                    self._trials.experiments.unsaved.setdefault(name, state)
        stored = await self._store.replicas()
        self._apply_records(stored)
        for identity, record in self._registry.records.items():
            if identity not in stored:
                self._registry.unsaved.setdefault(identity, record)

    async def _keep_sessions(self) -> None:
        """Learn the sessions there are, then store those that had a turn here."""
        async for session_hash, state in self._store.sessions():
            self._peers.learn_sessions({session_hash: state}, time.monotonic())
        while True:
            with suppress(StoreFull):  # their next turn stores them
                while sessions := self._peers.take_sessions():
                    await self._store.put_sessions(sessions, self._session_ttl_s)
            await asyncio.sleep(_SESSIONS_S)

    async def _join_pools(self, pool: PoolShare) -> None:
        """Bring directories together as models are found."""
        while True:
            await pool.join(self._store)
            await asyncio.sleep(_POOLS_S)

    async def _keep_doubts(self) -> None:
        """Tell whoever feeds a candidate of our doubts, until it has read history anew."""
        while True:
            for feed in self.shared:
                stream = self._caches.stream(feed.candidate)
                if isinstance(stream, SharedStream) and stream.doubt is not None:
                    self._peers.doubted(feed.candidate, stream.doubt)
            await asyncio.sleep(_DOUBT_S)

    def _doubted(self, candidate: CandidateId, reason: str) -> None:
        stream = self._caches.stream(candidate)
        if isinstance(stream, RankStream):
            logger.info(
                "another router doubts a candidate",
                extra={"candidate": candidate, "reason": reason},
            )
            stream.distrust(reason)

    async def _sweep(self) -> None:
        """Free what retired epochs left in Redis; one router does it at a time."""
        while True:
            await self._store.sweep()
            await asyncio.sleep(_SWEEP_S)


def _ignore(*_: object) -> None:
    """There is no pool, there are no tenants."""


def _told(facts: StoreFacts) -> str:
    return f"{facts.server} {facts.version} at {facts.address} ({facts.mode})"


def _first(group: BaseExceptionGroup[_Error]) -> _Error:
    """Find an error to tell of a group, which may hold groups."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _heed_cancellation() -> None:
    """Let a cancellation through that came with a failure.

    Before Python 3.13 a task group that is cancelled while one of its tasks fails tells of the
    failure only, and a loop that goes on after it would never end. The count of cancellations is
    true only if the failure met the group's body: one that met its exit leaves its own behind.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _without_message(error: BaseException) -> BaseException:
    """Keep the place where it happened, not what it was about."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
