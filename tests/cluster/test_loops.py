"""The loops: when notes are published, and what ends the heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
import uvloop

from router.base.errors import EMPTIED, StoreUnavailable
from router.base.messages import Answered, Began, Ended, Note
from router.cluster import outbox
from router.cluster import sharing as loops
from router.cluster.index_writer import IndexWriter
from router.cluster.redis_store import RedisStore
from tests.cluster.redis_stores import opened
from tests.nodes import Node as Peer
from tests.redis_servers import Start


async def test_an_emptied_redis_ends_the_keeper(start_redis: Start) -> None:
    """Its next beat finds another incarnation."""
    redis, peer = start_redis(), Peer("one")
    async with opened(redis.url, "one") as store:
        keeper = loops.LeaseKeeper(
            store,
            IndexWriter(store, peer.caches, router="one"),
            peer.peers,
            peer.outbox,
            lease_s=60.0,
            further=(),
            on_held=lambda held: None,
        )
        facts = await store.open()
        await keeper.beat(facts.incarnation)
        redis.client.flushall()

        with pytest.raises(StoreUnavailable, match=EMPTIED):
            await keeper.run(facts.incarnation)


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

    async def next_kinds(self) -> list[type[Note]]:
        return [type(note) for note in await self.next()]


async def published(peer: Peer, store: _Stored) -> None:
    """Publish what a router has in flight, until cancelled."""
    await loops.NotePublisher(cast(RedisStore, store), peer.outbox).run()


async def test_that_a_request_began_is_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens and ends wait for others, or for the next one that begins."""
    monkeypatch.setattr(outbox, "SOON_S", 3600.0)
    peer, store = Peer("one"), _Stored()
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(published(peer, store))

        first, _ = peer.begin("r1", [], 0.0)
        assert await store.next_kinds() == [Began]

        peer.outbox.answered(first, 0.0)
        peer.outbox.ended(first, computed=True)
        second, _ = peer.begin("r1", [], 0.0)
        assert await store.next_kinds() == [Answered, Ended, Began]

        monkeypatch.setattr(outbox, "SOON_S", 0.005)
        peer.outbox.ended(second, computed=True)
        assert await store.next_kinds() == [Ended]

        publishing.cancel()


async def test_requests_that_begin_in_a_burst_travel_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one goes at once, those of the next milliseconds in one message."""
    monkeypatch.setattr(loops, "BURST_S", 0.5)
    peer, store = Peer("one"), _Stored()
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(published(peer, store))
        await asyncio.sleep(0)
        await asyncio.sleep(0.6)  # a pause
        started_s = asyncio.get_running_loop().time()
        peer.begin("r1", [], 0.0)
        assert await store.next_kinds() == [Began]
        for _ in range(5):
            peer.begin("r1", [], 0.0)
            await asyncio.sleep(0.01)
        assert await store.next_kinds() == [Began] * 5
        assert asyncio.get_running_loop().time() >= started_s + 0.5

        publishing.cancel()


def test_notes_a_moment_after_a_message_wait_on_every_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On uvloop, which the router runs on, a wait of less than a millisecond is no timer."""
    monkeypatch.setattr(loops, "BURST_S", 0.0004)

    async def begin_many() -> int:
        peer, store = Peer("one"), _Stored()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(published(peer, store))
            for _ in range(100):
                for _ in range(3):
                    peer.begin("r1", [], 0.0)
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            publishing.cancel()
        return len(store.published)

    assert [uvloop.run(begin_many()), asyncio.run(begin_many())] == [300, 300]


async def test_what_is_only_shown_goes_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or alone after a while."""
    monkeypatch.setattr(outbox, "LATER_S", 3600.0)
    peer, store = Peer("one"), _Stored()
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(published(peer, store))
        await asyncio.sleep(0)
        peer.outbox.tell_later(Answered(1), 10)
        await asyncio.sleep(0.02)
        assert store.published == []
        peer.begin("r1", [], 0.0)
        assert await store.next_kinds() == [Began, Answered]

        monkeypatch.setattr(outbox, "LATER_S", 0.01)
        peer.outbox.tell_later(Answered(4), 10)
        assert await store.next() == [Answered(4)]

        publishing.cancel()
