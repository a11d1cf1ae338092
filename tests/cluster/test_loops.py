"""The loops against a real Redis: what one router publishes, the other one knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from router.cluster import loops
from router.cluster.loader import _load as load_once
from router.cluster.loops import DeltaWriter, LeaseKeeper, LogReader
from router.cluster.membership import Role
from router.cluster.redis_snapshot import IndexSnapshot
from router.cluster.redis_store import RedisStore
from router.errors import EMPTIED, StoreUnavailable
from router.messages import Answered, Began, Delta, Ended, Note, StreamId
from tests.cluster.model import CANDIDATE, STREAM, Node, PlainRedis
from tests.cluster.redis_stores import opened
from tests.index.contract.engine import PlayedEngine
from tests.nodes import Node as Peer
from tests.redis_servers import RedisServer, Start


class Router:
    """One router's memberships and loops, stepped by hand."""

    def __init__(self, name: str, store: RedisStore, engine: PlayedEngine) -> None:
        self.store = store
        self.node = Node(name, PlainRedis(), engine)
        self.received: list[Delta] = []
        self.held: list[frozenset[StreamId]] = []
        peer = Peer(name)
        self.writer = DeltaWriter(store, self.node.memberships, list)
        self.reader = LogReader(
            store,
            self.node.memberships,
            peer.peers,
            me=name,
            on_registered=lambda: None,
            on_pool=self.received.append,
        )
        self.keeper = LeaseKeeper(
            store,
            self.node.memberships,
            peer.peers,
            peer.outbox,
            lease_s=60.0,
            further=(),
            on_held=self.held.append,
        )

    async def step(self) -> None:
        await self.keeper._hold()
        self.node.follow()
        wanting = self.node.memberships.wanting()
        if wanting:
            await load_once(self.store, self.node.memberships, wanting)
        self.node.follow()
        while await self.writer.flush() and not self.writer.is_full:
            pass

    async def read(self) -> None:
        """Read all that is there."""
        for delta in (await self.store.read(self.cursor, block_s=0.0)).deltas:
            self.node.memberships.receive(delta)

    async def here(self) -> None:
        self.cursor = (await self.store.snapshot(())).cursor


@asynccontextmanager
async def routers(redis: RedisServer, namespace: str) -> AsyncIterator[tuple[Router, Router]]:
    engine = PlayedEngine(CANDIDATE)
    engine.compute(0, 4, again=False, tier="gpu")
    engine.compute(1, 8, again=True, tier="cpu")
    async with (
        opened(redis.url, "one", namespace=namespace) as one,
        opened(redis.url, "two", namespace=namespace) as two,
    ):
        first, second = Router("one", one, engine), Router("two", two, engine)
        for router in (first, second):
            router.node.reconnect()
            await router.here()
        yield first, second


async def test_what_one_publishes_the_other_knows(
    shared_redis: RedisServer, namespace: str
) -> None:
    """By snapshot, then by the log; and it goes on when the first one leaves."""
    async with routers(shared_redis, namespace) as (first, second):
        await first.step()
        await second.step()
        assert (first.node.role, second.node.role) == (Role.LEADING, Role.FOLLOWING)
        for tier in ("gpu", "cpu"):
            assert second.node.held(tier) == first.node.held(tier) != {}  # type: ignore[arg-type]

        engine = first.node.engine
        first.node.receive(engine.last_sequence + 1, engine.compute(2, 8, again=False, tier="gpu"))
        await first.writer.flush()
        await second.read()
        assert second.node.held() == first.node.held()

        await first.store.leave(first.held[-1])
        await second.step()
        assert second.node.role is Role.LEADING
        assert second.node.memberships.num_rewrites == 0
        assert second.held[-1] == {STREAM}


async def test_a_log_with_entries_missing_is_loaded_anew(
    start_redis: Start, namespace: str
) -> None:
    """But one that is all gone is another Redis' matter."""
    redis = start_redis()
    async with routers(redis, namespace) as (first, second):
        await first.step()
        await second.step()
        cursor = await second.reader._after_gap(second.cursor)
        assert second.reader.num_gaps == 1
        assert second.node.wants_load
        assert cursor.incarnation == second.cursor.incarnation
        redis.client.flushall()
        await second.store.open()

        with pytest.raises(StoreUnavailable, match=EMPTIED):
            await second.reader._after_gap(second.cursor)


async def test_a_snapshot_torn_by_a_flush_is_not_believed(
    start_redis: Start, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position says that all is there, and no delta would ever bring what is not."""
    redis = start_redis()
    async with routers(redis, namespace) as (first, second):
        await first.step()
        await second.keeper._hold()
        begin_snapshot = second.store.snapshot

        async def torn(stream_ids: Collection[StreamId] | None = None) -> IndexSnapshot:
            snapshot = await begin_snapshot(stream_ids)
            redis.client.flushall()
            return snapshot

        monkeypatch.setattr(second.store, "snapshot", torn)
        with pytest.raises(StoreUnavailable, match=EMPTIED):
            await load_once(second.store, second.node.memberships, [second.node.member])

        second.node.memberships.disconnected()
        second.node.follow()
        assert second.node.held() == first.node.held() != {}


async def test_an_emptied_redis_ends_the_keeper(start_redis: Start, namespace: str) -> None:
    """Its next beat finds another incarnation."""
    redis = start_redis()
    async with routers(redis, namespace) as (first, _):
        facts = await first.store.open()
        redis.client.flushall()

        with pytest.raises(StoreUnavailable, match=EMPTIED):
            await first.keeper.run(facts.incarnation)


async def test_a_full_redis_is_said_once(
    start_redis: Start, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Removals go through in between, and are no sign of room."""
    caplog.set_level("INFO", "router.cluster.loops")
    redis = start_redis(**{"maxmemory-policy": "noeviction"})
    async with routers(redis, namespace) as (first, second):
        await first.step()
        await second.step()
        await second.here()
        engine = first.node.engine
        redis.client.config_set("maxmemory", 1)
        for number in range(3):
            gone = [next(iter(first.node.held()))]
            first.node.receive(engine.last_sequence + 1, engine.evict(gone, "gpu"))
            payload = engine.compute(2, 2 + number, again=False, tier="gpu")
            first.node.receive(engine.last_sequence, payload)
            await first.writer.flush()
            await first.writer.flush()
        assert first.writer.is_full
        assert first.writer.num_refused >= 3
        redis.client.config_set("maxmemory", 0)
        await first.step()
        await first.step()
        await second.read()

        assert not first.writer.is_full
        assert second.node.held() == first.node.held()
        logged = [record for record in caplog.records if record.name == "router.cluster.loops"]
        assert [record.getMessage() for record in logged] == [
            "redis is full: the shared index is not updated; raise maxmemory",
            "redis accepts writes again",
        ]


class _Stored:
    """A store that keeps what is published."""

    def __init__(self) -> None:
        self.published: list[Note] = []
        self.came = asyncio.Event()

    async def publish(self, notes: Sequence[Note]) -> None:
        self.published += notes
        self.came.set()

    async def next(self) -> list[Note]:
        async with asyncio.timeout(30.0):
            await self.came.wait()
        self.came.clear()
        published, self.published = self.published, []
        return published


async def test_that_a_request_began_is_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens and ends wait for others, or for the next one that begins."""
    monkeypatch.setattr(loops, "FLUSH_S", 3600.0)
    peer, store = Peer("one"), _Stored()
    async with asyncio.TaskGroup() as group:
        publisher = loops.NotePublisher(cast(RedisStore, store), peer.outbox)
        publishing = group.create_task(publisher.run())

        first, _ = peer.begin("r1", [], 0.0)
        assert [type(note) for note in await store.next()] == [Began]

        peer.outbox.answered(first, 0.0)
        peer.outbox.ended(first, computed=True)
        second, _ = peer.begin("r1", [], 0.0)
        assert [type(note) for note in await store.next()] == [Answered, Ended, Began]

        monkeypatch.setattr(loops, "FLUSH_S", 0.005)
        peer.outbox.ended(second, computed=True)
        assert [type(note) for note in await store.next()] == [Ended]

        publishing.cancel()
