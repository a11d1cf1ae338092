"""This router's part in the shared index: with Redis while it is there, else without.

    with Redis      open -> what the others ordered and have in flight -> loops, until one fails
    without Redis   every engine followed directly, from where the log ended -> a pause -> try again

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
from router.cluster.candidate_names import CandidateNames
from router.cluster.candidate_source import CandidateSource
from router.cluster.link import PAUSE_S, Link
from router.cluster.loader import load_snapshots
from router.cluster.loops import (
    FLUSH_S,
    DeltaWriter,
    LeaseKeeper,
    LogReader,
    publish_notes,
    publish_usage,
)
from router.cluster.membership import Membership, Memberships, Role
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.pool_share import LISTER, PoolShare
from router.cluster.redis_facts import StoreFacts
from router.cluster.redis_store import RedisStore
from router.cluster.shared_stream import SharedStream
from router.errors import StoreError, StoreFull
from router.experiments.runner import ExperimentRunner
from router.index.cache_view import CacheView
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream
from router.messages import Registered, ReplicaRecord
from router.metrics import SharingState
from router.replicas.registry import Registry
from router.replicas.response_owners import ResponseOwners
from router.supervisor import described, ignore
from router.tenants import Accounts

logger = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=BaseException)

_SWEEP_S: Final = 2.0
_SESSIONS_S: Final = 1.0
_POOLS_S: Final = 0.2
_LEAVE_S: Final = 0.5
_SUSPICION_S: Final = 1.0  # a suspicion is sent so often until it is gone
_ORDERS_S: Final = 0.1  # how soon an order given here is stored
_FULL_S: Final = 1.0  # how soon Redis is asked again for what it had no room for
_SETTLE_S: Final = 1.0  # how long a candidate waits for Redis before it is followed without
_STEADY_S: Final = 3.0  # up for so long is no accident


class Sharing:
    """See the module. `run` is its life; `link` says whether Redis is there.

    Args:
        me: This router's name among the others, unique to the process.
        names: What candidates are called among routers.
        apply_records: Makes the registry follow what is stored.
        experiments: Their orders are shared as the registry's are.
        accounts: What tenants used; None: there are none.
        keeps_blocks: Whether blocks that other routers lead are kept here (index.mode local).
    """

    def __init__(
        self,
        store: RedisStore,
        *,
        me: str,
        caches: CacheView,
        names: CandidateNames,
        peers: Peers,
        outbox: Outbox,
        registry: Registry,
        apply_records: Callable[[Mapping[str, ReplicaRecord]], None],
        pool: PoolShare | None,
        lease_s: float,
        responses: ResponseOwners,
        session_ttl_s: float,
        keeps_blocks: bool,
        experiments: ExperimentRunner,
        accounts: Accounts | None = None,
        count_failure: Callable[[str], None] = ignore,
    ) -> None:
        self.link = Link()
        self.facts: StoreFacts | None = None  # of the last connection
        self.num_attempts = 0  # to connect
        self.memberships = Memberships(caches, keeps_blocks=keeps_blocks)
        self._store = store
        self._caches = caches
        self._names = names
        self._peers = peers
        self._outbox = outbox
        self._registry = registry
        self._apply_records = apply_records
        self._pool = pool
        self._experiments = experiments
        self._accounts = accounts
        self._count_failure = count_failure
        self._responses = responses
        self._session_ttl_s = session_ttl_s
        self._must_read_registry = asyncio.Event()
        self.reader = LogReader(
            store,
            self.memberships,
            peers,
            me=me,
            on_registered=self._must_read_registry.set,
            on_pool=pool.apply if pool is not None else _ignore,
            on_consumed=accounts.receive if accounts is not None else _ignore,
        )
        self.writer = DeltaWriter(store, self.memberships, pool.take if pool is not None else list)
        self.keeper = LeaseKeeper(
            store,
            self.memberships,
            peers,
            outbox,
            lease_s=lease_s,
            further=(LISTER,) if pool is not None else (),
            on_held=pool.held if pool is not None else _ignore,
        )
        peers.on_suspected = self._suspected

    def state(self) -> SharingState:
        """Describe it for /metrics and the admin API."""
        roles = {member.candidate: member.role.name.lower() for member in self.memberships}
        num_streams = Counter(roles.values())
        return SharingState(
            is_up=self.link.is_up,
            num_routers=self.keeper.num_routers if self.link.is_up else 1,
            num_streams={name: num_streams[name] for name in (role.name.lower() for role in Role)},
            counts={
                "outages": self.link.num_outages,
                "deltas_written": self.writer.num_deltas,
                "deltas_refused": self.writer.num_refused,
                "deltas_read": self.reader.num_deltas,
                "gaps": self.reader.num_gaps,
                "rewrites": self.memberships.num_rewrites,
                "snapshots": self.memberships.num_loads,
                "garbage": self._store.num_garbage,
            },
            reason=self.link.reason,
            redis=_server(self.facts) if self.facts is not None else None,
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
        id_ = self._names.stream_id_of(source.candidate)
        if id_ is None:  # removed meanwhile
            return
        member = self.memberships.join(id_, source.candidate, is_shared=self.link.is_up)
        try:
            while True:
                if member.role is Role.FOLLOWING:
                    await self._follow_router(member, source)
                else:
                    await self._follow_engine(member, source)
        finally:
            self.memberships.leave(member)

    async def _follow_engine(self, member: Membership, source: CandidateSource) -> None:
        """Follow the engine ourselves, until another router is to be followed."""
        events = source.events()
        known = self._caches.stream(member.candidate)
        if isinstance(known, RankStream):
            stream = known
        else:
            stream = source.rank_stream()
            self._caches.hand_over(member.candidate, stream)
            if isinstance(known, SharedStream) and known.position is not None:
                stream.resume(known.position, known.status(), time.monotonic())
            else:  # there is no point in the engine's history to go on from
                self._caches.index.clear(member.candidate)
        with closing(events):  # cancelled before its first step, the follower would not
            async with asyncio.TaskGroup() as tg:
                task = tg.create_task(follow(stream, events), name=f"events {member.candidate}")
                while member.role is not Role.FOLLOWING:
                    member.changed.clear()
                    await member.changed.wait()
                task.cancel()

    async def _follow_router(self, member: Membership, source: CandidateSource) -> None:
        """Follow another router through the log, until the engine has to be followed."""
        stream = source.shared_stream()
        self._caches.hand_over(member.candidate, stream)
        self.memberships.swap_in(member)
        while member.role is Role.FOLLOWING:
            member.changed.clear()
            await member.changed.wait()

    def restarted(self, candidate: CandidateId) -> None:
        """Let the others know that a candidate's engine is a new process, and holds nothing."""
        id_ = self._names.stream_id_of(candidate)
        member = self.memberships.get(id_) if id_ is not None else None
        if member is not None and member.role is Role.LEADING:
            self.memberships.end_epoch(member)
        else:
            self._outbox.suspected(candidate, "its engine restarted")

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
                    self.link.went_down(_first(group))
                except* Exception as group:  # a bug of ours; the side path ends no router
                    error, reason = _first(group), described(group)
                    self._count_failure("redis")
                    if reason != logged:
                        logged = reason
                        logger.error("internal error", exc_info=_without_message(error))
                    self.link.went_down(f"internal error: {reason}")
                _heed_cancellation()
                self._go_on_without()
                await self._store.close()
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._leave()

    def _go_on_without(self) -> None:
        self.memberships.disconnected()
        if self._pool is not None:
            self._pool.went_down()
        if self._accounts is not None:
            self._accounts.lost()
        self._outbox.resend()
        self._peers.expire(time.monotonic())

    async def _leave(self) -> None:
        """Give our leases back, so that no router has to wait for them to expire."""
        try:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    if self.link.is_up:
                        await self._store.leave(self.keeper.held)
        finally:
            await self._store.close()

    async def _share(self, backoff: Backoff) -> None:
        """Connect, read what the others have, and share until something fails.

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
            tg.create_task(publish_notes(self._store, self._outbox), name="redis: publish")
            tg.create_task(self.keeper.run(facts.incarnation), name="redis: leases")
            tg.create_task(load_snapshots(self._store, self.memberships), name="redis: snapshots")
            tg.create_task(self._sync_registry(), name="redis: registry")
            tg.create_task(self._store_sessions(), name="redis: sessions")
            tg.create_task(self._store_responses(), name="redis: responses")
            tg.create_task(self._repeat_suspicions(), name="redis: suspicions")
            tg.create_task(self._sweep(), name="redis: sweep")
            if self._accounts is not None:
                usage = publish_usage(self._store, self._accounts.note)
                tg.create_task(usage, name="redis: usage")
            if self._pool is not None:
                self._pool.came_up()
                tg.create_task(self._merge_pools(self._pool), name="redis: pool")
            self.link.came_up()
            await asyncio.sleep(_STEADY_S)
            self.link.steady()
            backoff.reset()
            await asyncio.Event().wait()  # for ever: the group must not be left before it fails

    async def join_routers(self) -> None:
        """Read what the other routers have in flight."""
        self._peers.join(await self._store.loads(), time.monotonic())

    async def _sync_registry(self) -> None:
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
            await self._store.records.put_replica(identity, record)
            self._registry.saved(identity, record)
            await self._store.publish((Registered(),))
        for name, state in list(self._experiments.unsaved.items()):
            await self._store.records.put_experiment(name, state)
            self._experiments.saved(name, state)
            await self._store.publish((Registered(),))

    async def _read_registry(self) -> None:
        """Follow what was ordered elsewhere; what Redis has lost of it is stored again."""
        states = await self._store.records.experiments()
        self._experiments.apply(states, time.time())
        for name, state in self._experiments.states.items():
            if name not in states:
                self._experiments.unsaved.setdefault(name, state)
        stored = await self._store.records.replicas()
        self._apply_records(stored)
        for identity, record in self._registry.records.items():
            if identity not in stored:
                self._registry.unsaved.setdefault(identity, record)

    async def _store_sessions(self) -> None:
        """Read the sessions there are, then store those that had a turn here."""
        async for session_hash, state in self._store.records.sessions():
            self._peers.learn_sessions({session_hash: state}, time.monotonic())
        while True:
            with suppress(StoreFull):  # their next turn stores them
                while sessions := self._outbox.take_sessions():
                    await self._store.records.put_sessions(sessions, self._session_ttl_s)
            await asyncio.sleep(_SESSIONS_S)

    async def _store_responses(self) -> None:
        """Store which replicas issued the responses that came through here."""
        while True:
            try:
                while owners := self._responses.unsaved():
                    await self._store.records.put_response_owners(owners, self._session_ttl_s)
                    self._responses.saved(owners)
            except StoreFull:
                await asyncio.sleep(_FULL_S)
            await asyncio.sleep(FLUSH_S)

    async def _merge_pools(self, pool: PoolShare) -> None:
        """Merge directories with what Redis has, as models are found."""
        while True:
            await pool.join(self._store)
            await asyncio.sleep(_POOLS_S)

    async def _repeat_suspicions(self) -> None:
        """Ask the leader of a suspect candidate to read history anew, until it has."""
        while True:
            for member in self.memberships:
                stream = self._caches.stream(member.candidate)
                if isinstance(stream, SharedStream) and stream.suspicion is not None:
                    self._outbox.suspected(member.candidate, stream.suspicion)
            await asyncio.sleep(_SUSPICION_S)

    def _suspected(self, candidate: CandidateId, reason: str) -> None:
        stream = self._caches.stream(candidate)
        if isinstance(stream, RankStream):
            logger.info(
                "another router suspects a candidate",
                extra={"candidate": candidate, "reason": reason},
            )
            stream.mark_suspect(reason)

    async def _sweep(self) -> None:
        """Free what retired epochs left in Redis; one router does it at a time."""
        while True:
            await self._store.sweep()
            await asyncio.sleep(_SWEEP_S)


def _ignore(*_: object) -> None:
    """There is no pool, there are no tenants."""


def _server(facts: StoreFacts) -> str:
    return f"{facts.server} {facts.version} at {facts.address} ({facts.mode})"


def _first(group: BaseExceptionGroup[_Error]) -> _Error:
    """Find the first error of a group, which may hold groups."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _heed_cancellation() -> None:
    """Let a cancellation through that came with a failure.

    Before Python 3.13 a task group that is cancelled while one of its tasks fails raises the
    failure only, and a loop that goes on after it would never end. The count of cancellations is
    true only if the failure met the group's body: one that met its exit leaves its own behind.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _without_message(error: BaseException) -> BaseException:
    """Keep the place where it happened, not what it was about."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
