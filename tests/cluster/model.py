"""Routers that share one candidate through a Redis of plain Python, driven by hand.

Nothing happens by itself: a test says when a router beats, writes, reads, loads, or follows its
role, and what goes wrong on the way. So every order of events can be played.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from policies.view import CandidateId
from router.cluster.leadership import Feed, Loading, Role, SharedFeeds
from router.cluster.redis_store import Written
from router.cluster.shared_stream import SharedStream
from router.contracts import BlockKey
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.copies import TIERS, Tier
from router.kv_events.stream import RankStream
from router.messages import Delta, FeedId, FeedState, Position, Standing, unpack_keys
from tests.engine import BLOCK_SIZE
from tests.index.contract.engine import PlayedEngine

FEED = FeedId("http://engine#0")
CANDIDATE = CandidateId("r1")


class PlainRedis:
    """One feed's part of a Redis: what router.cluster.redis_store promises of it, in memory."""

    def __init__(self) -> None:
        self.number: int | None = None  # None: it has never heard of the feed
        self.position: Position | None = None
        self.standing: Standing | None = None
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
        self.standing = delta.standing or self.standing
        self.log.append(delta)
        return Written.OK

    def state(self) -> FeedState | None:
        if self.number is None:
            return None
        is_fed = self.holder is not None and self.holder == self.writer
        return FeedState(self.number, self.position, self.standing, is_fed)

    def hold(self, router: str) -> bool:
        """Take the lease if it is free; tell whether it is ours."""
        self.holder = self.holder or router
        return self.holder == router

    def copy(self) -> PlainRedis:
        return deepcopy(self)

    def become(self, other: PlainRedis) -> None:
        """Be emptied, or be what it was at another time."""
        self.__dict__.update(deepcopy(other.__dict__))


class Node:
    """One router: its index, its feeds, and how far it has read."""

    def __init__(
        self, name: str, redis: PlainRedis, engine: PlayedEngine, *, keeps_blocks: bool = True
    ) -> None:
        self.name = name
        self.redis = redis
        self.engine = engine
        self.is_connected = False
        self.index = BlockIndex(max_pending=24)
        self.caches = CacheView(self.index)
        self.feeds = SharedFeeds(self.caches, keeps_blocks=keeps_blocks)
        self.caches.add(CANDIDATE, self._rank_stream())
        self.feed: Feed = self.feeds.join(FEED, CANDIDATE, is_shared=False)
        self.read_to = 0
        self.loading: Loading | None = None
        self.follow()

    @property
    def role(self) -> Role:
        return self.feed.role

    def held(self, tier: Tier = "gpu") -> dict[BlockKey, int]:
        return dict(self.index._held(CANDIDATE)[tier])

    # -- what the tasks of router.cluster do -------------------------------------------------

    def connect(self) -> None:
        self.read_to = len(self.redis.log)
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected, self.loading = False, None
        self.feeds.go_alone()

    def beat(self) -> bool:
        """Hold the lease if possible, and act on it; tell whether nothing is left to do."""
        is_held = self.redis.hold(self.name)
        state = self.redis.state()
        held = frozenset({FEED}) if is_held else frozenset()
        return self.feeds.deal(held, {FEED: state} if state is not None else {})

    def follow(self) -> None:
        """Do what the watch does when the role has changed."""
        known = self.caches.stream(CANDIDATE)
        if self.role is Role.FOLLOWING:
            if not isinstance(known, SharedStream):
                stream = SharedStream(
                    CANDIDATE, self.index, block_size=BLOCK_SIZE, capacity_blocks=1000
                )
                self.caches.hand_over(CANDIDATE, stream)
            self.feeds.settle(self.feed)
        elif isinstance(known, SharedStream):
            direct = self._rank_stream()
            self.caches.hand_over(CANDIDATE, direct)
            if known.position is not None:
                direct.resume(known.position, known.standing_now(), 0.0)
            else:
                self.index.clear(CANDIDATE)
            self.reconnect()
        elif self.feed.changed.is_set():
            self.reconnect()
        self.feed.changed.clear()

    def hear(self, sequence: int, payload: bytes) -> None:
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
            for farewell in self.feeds.farewells:
                self.redis.write(farewell, self.name)
            self.feeds.farewells.clear()
        if self.role is not Role.LEADING:
            return None
        delta = self.feeds.next_delta(self.feed)
        if delta is None:
            return None
        result = (send or self.redis.write)(delta, self.name)
        if result is Written.OK:
            self.feeds.acknowledge(self.feed)
        elif result is Written.NO_ROOM:
            self.feeds.no_room(self.feed)
        elif result is None:
            self.disconnect()
        else:
            self.feeds.lose(self.feed)
        return result

    def read(self, number: int = 1_000_000) -> None:
        """Read some entries of the log."""
        for delta in self.redis.log[self.read_to : self.read_to + number]:
            self.read_to += 1
            self.feeds.heard(delta)

    def skip(self) -> None:
        """Learn that entries of the log are gone, and go on behind them."""
        self.read_to = len(self.redis.log)
        self.feeds.gap()

    def begin_load(self) -> None:
        if self.feed.wants_load and self.feed.loading is None:
            loading = self.feeds.begin_load(self.feed)
            loading.state = self.redis.state()
            self.loading = loading if self.feeds.accepts(self.feed, loading) else None

    def end_load(self) -> None:
        """Read the blocks, which may be of a later moment than the state."""
        loading, self.loading = self.loading, None
        if loading is None:
            return
        if self.feed.has_blocks:
            for tier, held in self.redis.held.items():
                loading.staged.add(tier, list(held))
                loading.staged.add(tier, (), [(k, n) for k, n in held.items() if n > 1])
        state = self.redis.state()
        self.feeds.end_load(self.feed, loading, through=state.number if state is not None else None)

    def rejoin(self) -> None:
        """Notice that the engine is another process, forget what it had, and begin anew."""
        self.loading = None
        if self.role is Role.LEADING:
            self.feeds.end_epoch(self.feed)
        self.feeds.leave(self.feed)
        self.caches.drop(CANDIDATE)
        self.caches.add(CANDIDATE, self._rank_stream())
        self.feed = self.feeds.join(FEED, CANDIDATE, is_shared=self.is_connected)
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
    """Let everybody connect and do what is to be done, often enough for anything."""
    for node in nodes:
        if not node.is_connected:
            node.connect()
        node.reconnect()
    for _ in range(num_rounds):
        for node in nodes:
            node.step()
