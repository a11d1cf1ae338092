"""What this router tells others, and learns of them: a class for each subject.

    orders      what operators ordered about replicas
    pauses      that a replica was paused, resumed, or ordered to sleep or wake up
    records     sessions and responses, also for a router that starts
    queues      turns that wait, and who is the first that waits for room
    pools       who lists the shared pool, and what each router has learned of it

Queues. Each router has a queue of its own. Which conversations have room follows from notes on
requests. The rest is here. A wait at another router is no pause of its conversation. A conversation
that gives up its room gives it up everywhere. The first request that waits for room at any router
goes first at all of them.

Pools. One router holds the lease `pool` (`pool@NAME` if the pool has a name) and lists the master's
keys. All routers learn: from the events of engines, from verification. Each writes what it learned,
which needs no lease, and publishes it as notes. The last note about a block counts, our own
included.

A router that joins adds what Redis has to what it knows, and publishes what Redis lacks. The next
listing removes what is stale.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.decoding import Count, Number
from router.base.errors import StoreFull
from router.base.messages import (
    Delta,
    PoolChanged,
    Registered,
    ReplicaRecord,
    SharedId,
    StreamId,
    TierChange,
    pack_keys,
    pool_lister,
    pool_stream,
)
from router.cluster.candidate_source import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore
from router.pool.catalog import PoolCatalog
from router.pool.directory import PoolDirectory
from router.pool.follower import PoolFollower
from router.replicas.registry import Registry
from router.replicas.replica import Ordered
from router.replicas.response_owners import ResponseOwners
from router.scheduling.conversations import Conversations
from router.scheduling.queue import Elsewhere

_ORDERS_S: Final = 0.1  # how soon an order given here is stored
FULL_S: Final = 1.0  # how soon Redis is asked again for what it had no room for


class OrderShare:
    """The registry's orders, and when they are read and stored.

    Args:
        apply: Follows what Redis has.
    """

    def __init__(
        self,
        store: RedisStore,
        registry: Registry,
        apply: Callable[[Mapping[str, ReplicaRecord]], object],
    ) -> None:
        self._store = store
        self._registry = registry
        self._apply = apply
        self.must_read = asyncio.Event()  # another router has stored an order

    async def run(self) -> None:
        """Store what is ordered here; read what was ordered elsewhere."""
        while True:
            try:
                await self._store_all()
            except StoreFull:
                await asyncio.sleep(FULL_S)
            try:
                async with asyncio.timeout(_ORDERS_S):
                    await self.must_read.wait()
            except TimeoutError:
                continue
            self.must_read.clear()
            await self.read()

    async def _store_all(self) -> None:
        for identity, record in list(self._registry.unsaved.items()):
            await self._store.records.put_order(identity, record)
            self._registry.saved(identity, record)
            await self._store.publish((Registered(),))

    async def read(self) -> None:
        """Follow what was ordered elsewhere; what Redis has lost of it is stored again."""
        stored = await self._store.records.orders()
        self._apply(stored)
        for identity, record in self._registry.records.items():
            if identity not in stored:
                self._registry.unsaved.setdefault(identity, record)


class OrderNote(Struct, frozen=True, array_like=True, tag="ordered"):
    """A replica confirmed an order; see `Ordered`. `state` None: its metrics say it."""

    stream_id: SharedId
    state: Literal["paused", "awake"] | None
    is_lost: bool


def share_pauses(
    follow: Callable[[Ordered, float], None],
    *,
    names: CandidateNames,
    outbox: Outbox,
    peers: Peers,
) -> Callable[[Ordered], None]:
    """Follow the orders of other routers; return what tells them one of this router's."""

    def tell(order: Ordered) -> None:
        stream_id = names.stream_id_of(CandidateId(order.replica))
        if stream_id is not None:
            outbox.tell(OrderNote(stream_id, order.state, order.is_lost))

    def learn(note: OrderNote, router: str, now_s: float) -> None:
        candidate = names.candidate_of(note.stream_id)
        if candidate is not None:
            replica = candidate.partition("#")[0]
            follow(Ordered(replica, note.state, note.is_lost), now_s)

    peers.notes.register(OrderNote, learn)
    return tell


_SESSIONS_S: Final = 1.0
_RESPONSES_S: Final = 0.02  # how soon a response is stored


class RecordShare:
    """Which replica a session had its last turn at, and which one issued a response.

    Args:
        ttl_s: How long Redis keeps them.
    """

    def __init__(
        self,
        store: RedisStore,
        *,
        peers: Peers,
        outbox: Outbox,
        responses: ResponseOwners,
        ttl_s: float,
    ) -> None:
        self._store = store
        self._peers = peers
        self._outbox = outbox
        self._responses = responses
        self._ttl_s = ttl_s

    async def store_sessions(self) -> None:
        """Read the sessions there are, then store those that had a turn here, for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        async for session_hash, state in self._store.records.sessions():
            self._peers.learn_sessions({session_hash: state}, time.monotonic())
        while True:
            with suppress(StoreFull):  # their next turn stores them
                while sessions := self._outbox.take_sessions():
                    await self._store.records.put_sessions(sessions, self._ttl_s)
            await asyncio.sleep(_SESSIONS_S)

    def store_responses_again(self) -> None:
        """Store what was issued here once more: Redis may have lost it."""
        self._responses.lost()

    async def store_responses(self) -> None:
        """Store which replicas issued the responses that came through here, for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        while True:
            try:
                while owners := self._responses.unsaved():
                    await self._store.records.put_response_owners(owners, self._ttl_s)
                    self._responses.saved(owners)
            except StoreFull:
                await asyncio.sleep(FULL_S)
            await asyncio.sleep(_RESPONSES_S)


_PAUSE_S: Final = 0.1
"""Shortest pause between two notes on prompts that wait. An empty queue is published at once."""

_REPEAT_S: Final = 5.0
"""While prompts wait, the note is sent again after so long: a router that joins has missed it."""

_FORGET_S: Final = 15.0
"""A note counts for so long: the one on an empty queue may be lost with the connection to Redis."""

_NOTE_BYTES: Final = 40
_MOST_S: Final = 86_400.0


class TurnWaits(Struct, frozen=True, array_like=True, tag="turn_waits"):
    """A conversation's next turn waits at a router: its pause is over."""

    session_hash: Number
    has_room: bool = True  # False: its conversation has none, or no longer any


class WaitingNow(Struct, frozen=True, array_like=True, tag="for_room"):
    """How many requests wait for room at a router, and for how long the first one has."""

    num_waiting: Count = 0
    first_age_s: Annotated[float, Meta(ge=-_MOST_S, le=_MOST_S)] = 0.0
    """Negative if its prompt is long: short ones count as earlier."""


class _Waits(NamedTuple):
    num: int
    first_s: float
    until_s: float  # it counts until then


class QueueShare(Elsewhere):
    """Connects this router's queue with those of others.

    Args:
        conversations: Those whose turns wait at other routers.
    """

    def __init__(self, conversations: Conversations, *, outbox: Outbox, peers: Peers) -> None:
        self._conversations = conversations
        self._outbox = outbox
        self._peers = peers
        self._waiting: dict[str, _Waits] = {}  # by router
        self._published: tuple[int, float | None] = (0, None)
        self._published_s = 0.0
        peers.notes.register(TurnWaits, self._learn_asked)
        peers.notes.register(WaitingNow, self._learn_waits)

    def num_waiting(self, now_s: float) -> int:
        return sum([each.num for each in self._alive(now_s)])

    def first_s(self, now_s: float) -> float | None:
        return min([each.first_s for each in self._alive(now_s) if each.num], default=None)

    def waits(self, num: int, first_s: float | None, now_s: float) -> None:
        if (num, first_s) == self._published:
            if not num or now_s < self._published_s + _REPEAT_S:
                return
        elif num and now_s < self._published_s + _PAUSE_S:
            return
        self._published, self._published_s = (num, first_s), now_s
        age_s = 0.0 if first_s is None else now_s - first_s
        note = WaitingNow(num, max(-_MOST_S, min(_MOST_S, age_s)))
        self._outbox.tell_later(note, _NOTE_BYTES)

    def asked(self, session: int, *, has_room: bool) -> None:
        self._outbox.tell(TurnWaits(session, has_room))

    def _alive(self, now_s: float) -> list[_Waits]:
        if not self._waiting:
            return []
        held = [self._waiting[name] for name in self._peers.routers if name in self._waiting]
        return [each for each in held if now_s < each.until_s]

    def _learn_asked(self, note: TurnWaits, _: str, now_s: float) -> None:
        self._conversations.asked(note.session_hash, now_s)
        if not note.has_room:
            self._conversations.leave(note.session_hash)

    def _learn_waits(self, note: WaitingNow, router: str, now_s: float) -> None:
        alive = self._peers.routers
        self._waiting = {name: held for name, held in self._waiting.items() if name in alive}
        first_s, until_s = now_s - note.first_age_s, now_s + _FORGET_S
        self._waiting[router] = _Waits(note.num_waiting, first_s, until_s)


logger = logging.getLogger(__name__)

_MAX_KEYS: Final = 50_000  # in one delta


class PoolShare:
    """A pool's directories among routers.

    Args:
        follower: Lists the master's keys, or does not.
        name: The pool's; "" is the only one.
    """

    def __init__(self, pool: PoolCatalog, follower: PoolFollower, name: str = "") -> None:
        self.lister = pool_lister(name)  # the lease of the router that lists the master's keys
        self._name = name
        self._pool = pool
        self._follower = follower
        self._joined: set[str] = set()  # models whose directory was merged with what Redis has
        self._is_up = False
        self._rest: list[Delta] = []  # what Redis lacks, to be published

    def held(self, held: frozenset[StreamId] | None) -> None:
        """Record whether listing is ours; None: Redis is gone, and every router lists."""
        is_lister = held is None or self.lister in held
        if is_lister != self._follower.is_lister:
            self._follower.is_lister = is_lister
            self._pool.wants_listing = True
            logger.info(
                "this router lists the pool" if is_lister else "another router lists the pool"
            )

    def came_up(self) -> None:
        """Begin to note what we learn: Redis is there."""
        self._is_up = True
        self._joined.clear()
        self._rest.clear()

    def went_down(self) -> None:
        """Publish nothing: Redis is gone."""
        self._is_up = False
        for directory in self._pool.directories.values():
            directory.journal(False)
        self.held(None)

    async def join(self, store: RedisStore) -> None:
        """Merge directories with what Redis has, each once.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        for model, directory in list(self._pool.directories.items()):
            if model not in self._joined:
                self._joined.add(model)
                directory.journal(True)
                await self._merge(store, model, directory)

    async def _merge(self, store: RedisStore, model: str, directory: PoolDirectory) -> None:
        stream_id = pool_stream(model, self._name)
        shared: set[int] = set()
        async for blocks in (await store.pool_snapshot([stream_id])).slices():
            for keys in blocks.values():
                shared.update(keys.tolist())
                directory.apply(TierChange("pool", stored=keys.astype("<u8").tobytes()))
        lacking = [key for key in directory.keys() if key not in shared]
        for start in range(0, len(lacking), _MAX_KEYS):
            stored = pack_keys(lacking[start : start + _MAX_KEYS])
            self._rest.append(self._delta(model, TierChange("pool", stored=stored)))
        self._pool.wants_listing = True

    def take(self) -> list[Delta]:
        """Return what we learned since the last call."""
        deltas, self._rest = self._rest, []
        for model in self._joined if self._is_up else ():
            change = self._pool.directories[model].take_changes()
            if change is not None:
                deltas.append(self._delta(model, change))
        return deltas

    def apply(self, note: PoolChanged) -> None:
        """Apply what a router learned."""
        own = pool_stream("", self._name)
        directory = self._pool.directories.get(note.stream_id.removeprefix(own))
        if directory is None or not note.stream_id.startswith(own):
            return
        try:
            directory.apply(note.change)
        except ValueError:
            logger.warning("a note of the pool is not valid", extra={"stream": note.stream_id})

    def _delta(self, model: str, change: TierChange) -> Delta:
        return Delta(stream_id=pool_stream(model, self._name), changes=(change,))
