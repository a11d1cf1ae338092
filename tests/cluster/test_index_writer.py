"""What a router writes of a stream: changes, or everything, and never what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from policies.view import CandidateId
from router.base.messages import Delta, StreamHead, StreamId, unpack_keys
from router.cluster import index_writer
from router.cluster.index_writer import IndexWriter, StreamWriter
from router.cluster.redis_store import RedisStore, Written
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
from tests.engine import BLOCK_SIZE, batch, hashes, prompt, removed, stored

R1, STREAM, ME = CandidateId("r1"), StreamId("r1#0"), "me"


class PlainStore:
    """A Redis that is a set of blocks, and answers as the test says."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.head = StreamHead(position=None)
        self.deltas: list[Delta] = []
        self.num_clears = 0
        self.result = Written.OK

    async def write(self, deltas: Sequence[Delta]) -> list[Written]:
        if self.result is Written.OK or not any(c.stored for d in deltas for c in d.changes):
            for delta in deltas:
                self._write(delta)
            return [Written.OK for _ in deltas]
        return [self.result for _ in deltas]

    def _write(self, delta: Delta) -> None:
        self.deltas.append(delta)
        position = self.head.position
        if delta.cleared:
            self.num_clears += 1
            self.blocks, position = set(), None
        for change in delta.changes:
            self.blocks |= set(unpack_keys(change.stored))
            self.blocks -= set(unpack_keys(change.removed))
        self.head = StreamHead(position=delta.position or position, writer=ME)


class Scene:
    """An engine, a router that follows it, and a plain Redis."""

    def __init__(self, *, max_pending: int = 1000) -> None:
        self.index = BlockIndex(max_pending=max_pending)
        self.caches = CacheView(self.index)
        self.stream = RankStream(R1, self.index, block_size=BLOCK_SIZE, capacity_blocks=100)
        self.caches.add(R1, self.stream)
        self.store = PlainStore()
        self.writer = IndexWriter(cast(RedisStore, self.store), self.caches, router=ME)
        self.entry: StreamWriter = self.writer.add(STREAM, R1)
        self.num_batches = 0
        self.stream.connected()
        self.stream.begin_replay()
        self.stream.end_replay(is_complete=True)

    def compute(self, number: int) -> None:
        self.say(batch(stored(prompt(number))))

    def evict(self, number: int) -> None:
        self.say(batch(removed(hashes(prompt(number)))))

    def say(self, payload: bytes) -> None:
        self.stream.receive(self.num_batches, payload)
        self.num_batches += 1

    def hold(self, *held: StreamId) -> None:
        self.writer.update(frozenset({STREAM}), frozenset(held), {STREAM: self.store.head})

    async def flush(self) -> None:
        while await self.writer.flush() and not self.writer.is_full:
            pass

    @property
    def held(self) -> set[int]:
        held: set[int] = set()
        for change in self.index.contents(R1):
            held |= set(unpack_keys(change.stored))
        return held


async def test_a_router_writes_while_it_has_the_lease() -> None:
    """Everything at first, then changes; nothing without the lease."""
    scene = Scene()
    scene.compute(1)
    await scene.flush()
    assert scene.store.deltas == []
    scene.hold(STREAM)
    await scene.flush()
    assert scene.store.blocks == scene.held != set()
    num_deltas = len(scene.store.deltas)
    scene.compute(2)
    scene.evict(1)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert len(scene.store.deltas) == num_deltas + 1
    assert scene.store.head.position == scene.stream.position
    scene.hold()
    scene.compute(3)
    await scene.flush()
    assert scene.store.blocks != scene.held
    assert scene.writer.num_rewrites == 1


async def test_a_router_goes_on_from_the_blocks_it_loaded() -> None:
    """No other router wrote since; it writes only what changed."""
    scene = Scene()
    scene.compute(1)
    scene.store.blocks = scene.held
    scene.store.head = StreamHead(position=scene.stream.position, writer="another")
    scene.entry.loaded(scene.store.head)
    scene.compute(2)
    scene.hold(STREAM)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.writer.num_rewrites == 0


@pytest.mark.parametrize("is_lost", [False, True])
async def test_after_an_outage_only_changes_are_written(is_lost: bool) -> None:
    """Whether or not the last delta arrived, if no other router wrote and Redis lost nothing."""
    scene = Scene()
    scene.compute(1)
    scene.hold(STREAM)
    await scene.flush()
    scene.compute(2)
    delta = scene.entry.next_delta(scene.stream)
    assert delta is not None
    if not is_lost:
        await scene.store.write([delta])
    scene.writer.pause()
    scene.compute(3)
    scene.hold(STREAM)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.writer.num_rewrites == 1


@pytest.mark.parametrize(
    "head", [StreamHead(position=None), None, "another router's"], ids=["none", "gone", "another"]
)
async def test_after_a_change_by_others_everything_is_written(head: object) -> None:
    """Redis was emptied, or another router wrote meanwhile."""
    scene = Scene()
    scene.compute(1)
    scene.hold(STREAM)
    await scene.flush()
    scene.writer.pause()
    if isinstance(head, str):
        scene.store.head = StreamHead(position=scene.stream.position, writer="another")
    else:
        scene.store.head = StreamHead(position=None)
    scene.store.blocks = {1, 2, 3}
    scene.hold(STREAM)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.writer.num_rewrites == 2


async def test_a_rewrite_is_whole_whatever_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no position before the last part."""
    monkeypatch.setattr(index_writer, "CHUNK_BLOCKS", 2)
    scene = Scene()
    for number in range(1, 5):
        scene.compute(number)
    scene.hold(STREAM)
    for number in range(1, 4):
        await scene.writer.flush()
        assert scene.store.head.position is None
        scene.evict(number)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.store.head.position == scene.stream.position


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_gap_at_a_beat_is_no_rewrite(is_taken: bool) -> None:
    """The lease is not asked for until history is read; another router may write meanwhile."""
    scene = Scene()
    history = [batch(stored(prompt(number))) for number in (1, 2, 3)]
    scene.say(history[0])
    scene.hold(STREAM)
    await scene.flush()
    scene.stream.receive(2, history[2])
    assert scene.writer.wanted() == []
    scene.writer.update(frozenset(), frozenset(), {})
    if is_taken:
        scene.store.head = StreamHead(position=scene.store.head.position, writer="another")
        scene.store.blocks.clear()
    for sequence in range(scene.stream.begin_replay(), 3):
        scene.stream.replayed(sequence, history[sequence])
    scene.stream.end_replay(is_complete=True)
    await scene.flush()
    assert scene.store.blocks != scene.held
    assert scene.writer.wanted() == [STREAM]
    scene.hold(STREAM)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.writer.num_rewrites == 1 + is_taken


async def test_a_full_redis_has_nothing_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    """No router starts from what is old, until there is room for everything. Both are logged."""
    caplog.set_level("INFO", "router.cluster.index_writer")
    scene = Scene()
    scene.compute(1)
    scene.compute(2)
    scene.hold(STREAM)
    await scene.flush()
    scene.store.result = Written.NO_ROOM
    for number in (3, 4):
        scene.compute(number)
        scene.evict(number - 2)
        await scene.flush()
        await scene.flush()
    assert scene.writer.is_full
    assert scene.store.blocks == set()
    assert scene.store.head.position is None
    scene.store.result = Written.OK
    await scene.writer.flush()
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.store.head.position == scene.stream.position
    assert [r.getMessage() for r in caplog.records if "redis " in r.getMessage()][-2:] == [
        "redis is full: the shared index is not updated; raise maxmemory",
        "redis accepts writes again",
    ]


async def test_a_log_that_is_mostly_old_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So Redis needs a few times what is held, whatever comes and goes."""
    monkeypatch.setattr(index_writer, "MAX_OLD", 8)
    scene = Scene()
    scene.hold(STREAM)
    await scene.flush()
    largest = 0
    for number in range(1, 200):
        scene.compute(number)
        if number > 2:
            scene.evict(number - 2)
        await scene.flush()
        assert scene.store.blocks == scene.held
        assert scene.store.head.position == scene.stream.position
        largest = max(largest, scene.entry.num_logged)

    assert largest <= 2 * len(scene.held) + 8 + 2 * len(hashes(prompt(1)))
    assert scene.store.num_clears > 5
    assert scene.writer.num_rewrites == 1


async def test_a_journal_that_overflowed_is_a_rewrite() -> None:
    """Too much changed while Redis was away."""
    scene = Scene(max_pending=8)
    scene.compute(1)
    scene.hold(STREAM)
    await scene.flush()
    for number in range(2, 8):
        scene.compute(number)
    await scene.flush()

    assert scene.store.blocks == scene.held
    assert scene.writer.num_rewrites == 2


def test_a_stream_that_was_not_read_is_not_written() -> None:
    """Redis may have more of it."""
    scene = Scene()
    assert scene.writer.wanted() == [STREAM]
    scene.stream.connected()
    scene.stream.mark_suspect("wrong")

    assert scene.writer.wanted() == []
