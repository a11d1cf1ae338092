"""Routers that share one candidate through a Redis of plain Python, driven by hand.

Nothing happens by itself: a test says when a router beats, writes, reads, loads, or follows its
role, and what goes wrong on the way. So every order of events can be played.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from policies.view import CandidateId
from router.cluster.catch_up import Loading
from router.cluster.membership import Membership, Memberships, Role
from router.cluster.publication import Publication
from router.cluster.redis_store import Written
from router.cluster.shared_stream import SharedStream
from router.contracts import BlockKey
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.copies import TIERS, Tier
from router.kv_events.stream import RankStream
from router.messages import Delta, Position, StreamHead, StreamId, StreamStatus, unpack_keys
from tests.engine import BLOCK_SIZE
from tests.index.contract.engine import PlayedEngine

STREAM = StreamId("http://engine#0")
CANDIDATE = CandidateId("r1")


class PlainRedis:
    """One stream's part of a Redis: what router.cluster.redis_store promises of it, in memory."""

    def __init__(self) -> None:
        self.number: int | None = None  # None: it does not know the stream
        self.position: Position | None = None
        self.status: StreamStatus | None = None
        self.held: dict[Tier, dict[BlockKey, int]] = {tier: {} for tier in TIERS}
        self.log: list[Delta] = []
        self.holder: str | None = None  # of the lease
        self.writer: str | None = None  # of the last delta
        self.is_full = False

    def write(self, delta: Delta, router: str) -> Written:
        """Apply a delta as router/cluster/lua/write.lua does."""
        if self.holder != router:
            return Written.FENCED
        if delta.number != (self.number or 0) + 1:
            return Written.LOST
        if self.is_full and any(change.stored or change.copies for change in delta.changes):
            return Written.NO_ROOM
        self.number, self.writer = delta.number, router
        if delta.cleared:
            self.held = {tier: {} for tier in TIERS}
        for change in delta.changes:
            assert change.tier != "pool"
            held = self.held[change.tier]
            for key in unpack_keys(change.removed):
                held.pop(key, None)
            for key in unpack_keys(change.stored):
                held.setdefault(key, 1)
            held.update(change.copies)
        if delta.continues:
            self.position = None
        elif delta.cleared or delta.position is not None:
            self.position = delta.position
        self.status = delta.status or self.status
        self.log.append(delta)
        return Written.OK

    def head(self) -> StreamHead | None:
        if self.number is None:
            return None
        has_leader = self.holder is not None and self.holder == self.writer
        return StreamHead(self.number, self.position, self.status, has_leader)

    def hold(self, router: str) -> bool:
        """Take the lease if it is free; return whether it is ours."""
        self.holder = self.holder or router
        return self.holder == router

    def copy(self) -> PlainRedis:
        return deepcopy(self)

    def become(self, other: PlainRedis) -> None:
        """Be emptied, or be what it was at another time."""
        self.__dict__.update(deepcopy(other.__dict__))


class Node:
    """One router: its index, its membership, and how far it has read."""

    def __init__(
        self, name: str, redis: PlainRedis, engine: PlayedEngine, *, keeps_blocks: bool = True
    ) -> None:
        self.name = name
        self.redis = redis
        self.engine = engine
        self.is_connected = False
        self.index = BlockIndex(max_pending=24)
        self.caches = CacheView(self.index)
        self.memberships = Memberships(self.caches, keeps_blocks=keeps_blocks)
        self.caches.add(CANDIDATE, self._rank_stream())
        self.member: Membership = self.memberships.join(STREAM, CANDIDATE, is_shared=False)
        self.read_to = 0
        self.loading: Loading | None = None
        self.follow()

    @property
    def role(self) -> Role:
        return self.member.role

    @property
    def publication(self) -> Publication:
        assert self.member.publication is not None
        return self.member.publication

    @property
    def wants_load(self) -> bool:
        return self.member.catch_up.wanted

    def held(self, tier: Tier = "gpu") -> dict[BlockKey, int]:
        return dict(self.index._held(CANDIDATE)[tier])

    # -- what the tasks of router.cluster do -------------------------------------------------

    def connect(self) -> None:
        self.read_to = len(self.redis.log)
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected, self.loading = False, None
        self.memberships.disconnected()

    def beat(self) -> bool:
        """Hold the lease if possible, and act on it; return whether nothing is left to do."""
        is_held = self.redis.hold(self.name)
        head = self.redis.head()
        held = frozenset({STREAM}) if is_held else frozenset()
        return self.memberships.reconcile(held, {STREAM: head} if head is not None else {})

    def follow(self) -> None:
        """Do what the watch does when the role has changed."""
        known = self.caches.stream(CANDIDATE)
        if self.role is Role.FOLLOWING:
            if not isinstance(known, SharedStream):
                stream = SharedStream(
                    CANDIDATE, self.index, block_size=BLOCK_SIZE, capacity_blocks=1000
                )
                self.caches.hand_over(CANDIDATE, stream)
            self.memberships.swap_in(self.member)
        elif isinstance(known, SharedStream):
            direct = self._rank_stream()
            self.caches.hand_over(CANDIDATE, direct)
            if known.position is not None:
                direct.resume(known.position, known.status(), 0.0)
            else:
                self.index.clear(CANDIDATE)
            self.reconnect()
        elif self.member.changed.is_set():
            self.reconnect()
        self.member.changed.clear()

    def receive(self, sequence: int, payload: bytes) -> None:
        """Take a batch as it is published."""
        stream = self.caches.stream(CANDIDATE)
        if isinstance(stream, RankStream):
            stream.receive(sequence, payload)

    def reconnect(self) -> None:
        """Let the subscription break and come back, and read what is wanted."""
        stream = self.caches.stream(CANDIDATE)
        if not isinstance(stream, RankStream):
            return
        stream.opened(has_replay=True)
        stream.connected()
        while stream.wanted_replay is not None:
            start = stream.begin_replay()
            for sequence, payload in self.engine.replay(start):
                stream.replayed(sequence, payload)
            stream.end_replay(is_complete=True)

    def flush(self, send: Callable[[Delta, str], Written | None] | None = None) -> Written | None:
        """Write the next delta; `send` gives what became of it, None: the connection broke."""
        if self.is_connected:
            for tombstone in self.memberships.tombstones:
                self.redis.write(tombstone, self.name)
            self.memberships.tombstones.clear()
        if self.role is not Role.LEADING:
            return None
        delta = self.memberships.next_delta(self.member)
        if delta is None:
            return None
        result = (send or self.redis.write)(delta, self.name)
        if result is Written.OK:
            self.publication.acknowledge()
        elif result is Written.NO_ROOM:
            self.publication.no_room()
        elif result is None:
            self.disconnect()
        else:
            self.memberships.step_down(self.member)
        return result

    def read(self, number: int = 1_000_000) -> None:
        """Read some entries of the log."""
        for delta in self.redis.log[self.read_to : self.read_to + number]:
            self.read_to += 1
            self.memberships.receive(delta)

    def skip(self) -> None:
        """Learn that entries of the log are gone, and go on behind them."""
        self.read_to = len(self.redis.log)
        self.memberships.reload()

    def begin_load(self) -> None:
        if self.memberships.wanting():
            loading = self.memberships.begin_load(self.member)
            loading.head = self.redis.head()
            self.loading = loading if self.memberships.accepts(self.member, loading) else None

    def end_load(self) -> None:
        """Read the blocks, which may be of a later moment than the state."""
        loading, self.loading = self.loading, None
        if loading is None:
            return
        if self.member.has_blocks:
            for tier, held in self.redis.held.items():
                loading.staged.add(tier, list(held))
                loading.staged.add(tier, (), [(k, n) for k, n in held.items() if n > 1])
        head = self.redis.head()
        through = head.number if head is not None else None
        self.memberships.end_load(self.member, loading, through=through)

    def rejoin(self) -> None:
        """Notice that the engine is another process, forget what it had, and begin anew."""
        self.loading = None
        if self.role is Role.LEADING:
            self.memberships.end_epoch(self.member)
        self.memberships.leave(self.member)
        self.caches.drop(CANDIDATE)
        self.caches.add(CANDIDATE, self._rank_stream())
        self.member = self.memberships.join(STREAM, CANDIDATE, is_shared=self.is_connected)
        self.follow()
        self.reconnect()

    def step(self) -> None:
        """Do all that is to be done, once."""
        self.read()
        self.beat()
        self.follow()
        self.begin_load()
        self.end_load()
        self.follow()
        self.flush()
        self.read()

    def _rank_stream(self) -> RankStream:
        return RankStream(CANDIDATE, self.index, block_size=BLOCK_SIZE, capacity_blocks=1000)


def settle(*nodes: Node, num_rounds: int = 80) -> None:
    """Let all connect and do what is to be done, often enough for anything."""
    for node in nodes:
        if not node.is_connected:
            node.connect()
        node.reconnect()
    for _ in range(num_rounds):
        for node in nodes:
            node.step()
