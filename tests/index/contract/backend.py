"""The seam of the suite: one way of holding the index, and the backends there are.

A backend receives live batches (or does not: those are lost), and must know everything once it has
settled. What goes wrong inside it at random it does itself, in `disturb`.

All calls are plain ones. A backend whose index answers asynchronously owns an `asyncio.Runner` and
runs its coroutines in it; `close` closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from policies.view import CandidateId
from router.cluster.shared_stream import SharedStream
from router.contracts import BlockKey
from router.index.block_index import BlockIndex, BlockMatch
from router.index.cache_view import CacheView
from router.index.copies import TIERS, Copies, Tier
from router.index.journal import Changes
from router.index.staged_blocks import StagedBlocks
from router.kv_events.stream import RankStream
from router.messages import (
    Delta,
    StreamHead,
    StreamId,
    TierChange,
    decode_delta,
    encode,
    unpack_keys,
)
from tests.engine import BLOCK_SIZE
from tests.index.contract.engine import PlayedEngine

CAPACITY = 1000


class Backend(Protocol):
    """One way of holding the index of some engines."""

    begun_anew: set[CandidateId]
    """Whose history was read from the start, as far as it goes; the suite takes them out."""

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        """Take a batch as it is published."""

    def reconnect(self, candidate: CandidateId) -> None:
        """Notice that the connection was lost and is there again: another process may be there."""

    def disturb(self, what: int, how: int) -> None:
        """Let something go wrong, or merely happen: both numbers are random, from 0 and from 1."""

    def settle(self) -> None:
        """Learn all there is to know; every engine is there and answers."""

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        """Match as routing does."""

    def claim(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Callable[[], None]:
        """Claim that these blocks are being computed; call what is returned to end it."""

    def close(self) -> None:
        """Give everything back."""


# -- follows the engines -------------------------------------------------------------------------


class Router:
    """One router's index and streams."""

    def __init__(self, engines: Mapping[CandidateId, PlayedEngine]) -> None:
        self.engines = engines
        self.index = BlockIndex(max_pending=24)
        self.caches = CacheView(self.index)
        self.direct: dict[CandidateId, RankStream] = {}
        self.shared: dict[CandidateId, SharedStream] = {}

    def follow_engine(self, candidate: CandidateId) -> RankStream:
        stream = RankStream(candidate, self.index, block_size=BLOCK_SIZE, capacity_blocks=CAPACITY)
        self.direct[candidate] = stream
        self.caches.hand_over(candidate, stream)
        return stream

    def follow_stream(self, candidate: CandidateId) -> SharedStream:
        stream = SharedStream(
            candidate, self.index, block_size=BLOCK_SIZE, capacity_blocks=CAPACITY
        )
        self.shared[candidate] = stream
        self.caches.hand_over(candidate, stream)
        return stream

    def reconnect(self) -> None:
        """Let every subscription break and come back, and read what is wanted."""
        for candidate, stream in self.direct.items():
            stream.connected()
            self.replay(candidate)

    def replay(self, candidate: CandidateId) -> None:
        stream = self.direct[candidate]
        while stream.wanted_replay is not None:
            start = stream.begin_replay()
            for sequence, payload in self.engines[candidate].replay(start):
                stream.replayed(sequence, payload)
            stream.end_replay(is_complete=True)


class LocalIndex:
    """The index of a router that follows every engine itself."""

    def __init__(self, engines: Mapping[CandidateId, PlayedEngine]) -> None:
        self.begun_anew: set[CandidateId] = set()
        self.router = Router(engines)
        for candidate in engines:
            self.router.follow_engine(candidate)
        self.settle()

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        self.router.direct[candidate].receive(sequence, payload)

    def reconnect(self, candidate: CandidateId) -> None:
        self.router.direct[candidate].connected()

    def disturb(self, what: int, how: int) -> None:
        candidates = list(self.router.direct)
        candidate = candidates[how % len(candidates)]
        if what % 4 == 0:
            self.router.direct[candidate].verify()
        elif what % 4 == 1:
            self.router.direct[candidate].connected()
        elif what % 4 == 2:
            self.router.replay(candidate)
        else:
            self.router.direct[candidate].mark_suspect("at random")
            self.begun_anew.add(candidate)

    def settle(self) -> None:
        self.router.reconnect()

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        return self.router.caches.match(chain, candidates)

    def claim(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Callable[[], None]:
        return self.router.index.speculate(candidate, keys).end

    def close(self) -> None:
        pass


# -- follows a router that follows the engines ---------------------------------------------------


class SharedStore:
    """What Redis is to routers, in plain dicts: blocks, heads, log."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[StreamId, Tier], Copies] = {}
        self.heads: dict[StreamId, StreamHead] = {}
        self.log: list[bytes] = []

    def write(self, delta: Delta) -> None:
        before = self.heads.get(delta.stream_id, StreamHead(0, None, None))
        assert delta.number == before.number + 1
        for tier in TIERS if delta.cleared else ():
            self.blocks[delta.stream_id, tier] = {}
        for change in delta.changes:
            assert change.tier != "pool"
            held = self.blocks.setdefault((delta.stream_id, change.tier), {})
            self._write(held, change)
        position = before.position
        if delta.continues or delta.cleared or delta.position is not None:
            position = None if delta.continues else delta.position
        status = before.status if delta.status is None else delta.status
        self.heads[delta.stream_id] = StreamHead(delta.number, position, status)
        self.log.append(encode(delta))

    @staticmethod
    def _write(held: Copies, change: TierChange) -> None:
        """Write as Redis does: a bit for each block, and copies beside it where given."""
        for key in unpack_keys(change.stored):
            held.setdefault(key, 1)
        held.update(change.copies)
        for key in unpack_keys(change.removed):
            held.pop(key, None)

    def read(
        self, stream_id: StreamId, tier: Tier, half: int
    ) -> tuple[list[BlockKey], list[tuple[BlockKey, int]]]:
        """Read every other block, so that a snapshot is of two moments."""
        held = {k: n for k, n in self.blocks.get((stream_id, tier), {}).items() if k % 2 == half}
        return list(held), [(key, n) for key, n in held.items() if n > 1]


class Leader:
    """Writes what a router learns of its engines; as the owner of a journal must."""

    def __init__(self, router: Router, store: SharedStore) -> None:
        self._router = router
        self._store = store
        self._rewrites: dict[CandidateId, Iterator[TierChange]] = {}

    def publish(self, candidate: CandidateId, max_blocks: int) -> bool:
        """Write one delta; False: there was nothing to say."""
        index, stream_id = self._router.index, stream_id_of(candidate)
        changes = index.take_changes(candidate, max_blocks)
        state = self._store.heads.get(stream_id, StreamHead(0, None, None))
        stream = self._router.direct[candidate]
        if changes is None:
            changes = self._next_slice(candidate) or Changes()
        elif changes.is_lost:
            self.rewrite(candidate)
            changes = Changes(cleared=True, is_whole=False)
        continues = candidate in self._rewrites or not changes.is_whole
        position = None if continues else stream.position
        status = stream.status()
        if changes == Changes() and (
            (status == state.status and position in (None, state.position)) or continues
        ):
            return False
        self._store.write(
            Delta(
                stream_id,
                state.number + 1,
                cleared=changes.cleared,
                changes=changes.changes,
                position=position,
                status=None if status == state.status else status,
                continues=continues,
            )
        )
        return True

    def rewrite(self, candidate: CandidateId) -> None:
        """Begin to publish everything that is held."""
        self._rewrites[candidate] = self._router.index.contents(candidate, 3)

    def is_rewriting(self, candidate: CandidateId) -> bool:
        """Return whether the position is still unknown to the store."""
        return candidate in self._rewrites

    def _next_slice(self, candidate: CandidateId) -> Changes | None:
        rewrite = self._rewrites.get(candidate)
        if rewrite is None:
            return None
        change = next(rewrite, None)
        if change is None:
            del self._rewrites[candidate]
            return None
        return Changes((change,))


class FollowedIndex:
    """The index of a router that follows another's stream: snapshots, the log, suspicions."""

    def __init__(self, engines: Mapping[CandidateId, PlayedEngine]) -> None:
        self.begun_anew: set[CandidateId] = set()
        self.engines = engines
        self.store = SharedStore()
        self.leader = Router(engines)
        for candidate in engines:
            self.leader.index.journal(candidate, on=True)
            self.leader.follow_engine(candidate)
        self.publisher = Leader(self.leader, self.store)
        self._join()
        self.settle()

    def _join(self) -> None:
        """Let a follower come that knows nothing."""
        self.follower = Router(self.engines)
        for candidate in self.engines:
            self.follower.follow_stream(candidate)
        self.num_read = len(self.store.log)
        self.begun: dict[CandidateId, tuple[StreamHead, StagedBlocks, int]] = {}

    def receive(self, candidate: CandidateId, sequence: int, payload: bytes) -> None:
        self.leader.direct[candidate].receive(sequence, payload)

    def reconnect(self, candidate: CandidateId) -> None:
        self.leader.direct[candidate].connected()

    def disturb(self, what: int, how: int) -> None:
        candidates = list(self.engines)
        candidate = candidates[how % len(candidates)]
        happenings: list[Callable[[], object]] = [
            lambda: self.publisher.publish(candidate, how),
            lambda: self._read(how),
            lambda: self._read_again(how),
            lambda: self._miss(how),
            lambda: self._begin_snapshot(candidate),
            lambda: self._end_snapshot(candidate),
            lambda: self.leader.replay(candidate),
            lambda: self._mark_suspect(candidate) if how == 1 else None,  # they end what went wrong
            lambda: self._rename(candidate) if how == 2 else None,
        ]
        happenings[what % len(happenings)]()

    def settle(self) -> None:
        self.leader.reconnect()
        self._catch_up()
        if self._suspects_again():  # sent until it is gone: its end may have been missed
            self.leader.reconnect()
            self._catch_up()

    def _suspects_again(self) -> bool:
        suspects = [c for c, stream in self.follower.shared.items() if stream.suspicion is not None]
        for candidate in suspects:
            self.leader.direct[candidate].mark_suspect("suspected again")
            self.begun_anew.add(candidate)
        return bool(suspects)

    def _catch_up(self) -> None:
        for candidate in self.engines:
            while self.publisher.publish(candidate, 5) or self.publisher.is_rewriting(candidate):
                pass
        self._follow_to_the_end()
        for candidate, stream in self.follower.shared.items():
            assert stream.has_history
            assert stream.number == self.store.heads[stream_id_of(candidate)].number
            assert stream.position == self.store.heads[stream_id_of(candidate)].position

    def _follow_to_the_end(self) -> None:
        self._read(len(self.store.log))
        for candidate, stream in self.follower.shared.items():
            state = self.store.heads.get(stream_id_of(candidate))
            is_behind = state is not None and stream.number != state.number
            if stream.wants_snapshot or is_behind:  # the log's own numbers show that
                self._begin_snapshot(candidate)
                self._end_snapshot(candidate)
        self._read(len(self.store.log))

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        return self.follower.caches.match(chain, candidates)

    def claim(self, candidate: CandidateId, keys: Sequence[BlockKey]) -> Callable[[], None]:
        return self.follower.index.speculate(candidate, keys).end

    def close(self) -> None:
        pass

    # -- what happens ------------------------------------------------------------------------

    def _read(self, num_entries: int) -> None:
        for entry in self.store.log[self.num_read : self.num_read + num_entries]:
            delta = decode_delta(entry)
            self.follower.shared[candidate_of(delta.stream_id)].apply(delta)
            self.num_read += 1

    def _read_again(self, num_entries: int) -> None:
        self.num_read = max(0, self.num_read - num_entries)

    def _miss(self, num_entries: int) -> None:
        """Let the log be trimmed before it was read."""
        if num_entries > 6:
            self.num_read = min(len(self.store.log), self.num_read + num_entries - 6)

    def _begin_snapshot(self, candidate: CandidateId) -> None:
        staged = StagedBlocks()
        state = self.store.heads.get(stream_id_of(candidate))
        if state is not None:
            self._stage(candidate, staged, 0)
            self.begun[candidate] = state, staged, len(self.store.log)

    def _end_snapshot(self, candidate: CandidateId) -> None:
        if candidate not in self.begun:
            return
        state, staged, num_read = self.begun.pop(candidate)
        self._stage(candidate, staged, 1)
        through = self.store.heads[stream_id_of(candidate)].number
        self.follower.shared[candidate].load(state, staged, through=through)
        self.num_read = min(self.num_read, num_read)

    def _stage(self, candidate: CandidateId, staged: StagedBlocks, half: int) -> None:
        for tier in TIERS:
            staged.add(tier, *self.store.read(stream_id_of(candidate), tier, half))

    def _mark_suspect(self, candidate: CandidateId) -> None:
        stream = self.follower.shared[candidate]
        stream.mark_suspect("at random")
        assert stream.suspicion is not None
        self.leader.direct[candidate].mark_suspect(stream.suspicion)
        self.begun_anew.add(candidate)

    def _rename(self, candidate: CandidateId) -> None:
        """Let the leader find out that it has named blocks wrongly: it must read again."""
        stream = self.leader.direct[candidate]
        if stream.position is not None:
            stream._read_again()
            self.begun_anew.add(candidate)


class ResumedIndex(FollowedIndex):
    """The same, but the router that leads dies now and then, and the follower takes its place."""

    def disturb(self, what: int, how: int) -> None:
        if what % 10 == 9:
            if how <= 4:
                self._last_words(how)
            self._die(with_store=how % 2 == 0)
        else:
            super().disturb(what % 10, how)

    def match(
        self, chain: Sequence[BlockKey], candidates: Sequence[CandidateId]
    ) -> Mapping[CandidateId, BlockMatch]:
        followed = self.follower.caches.match(chain, candidates)
        led = self.leader.caches.match(chain, candidates)
        for candidate in candidates:
            assert led[candidate].num_gpu_stored_blocks == followed[candidate].num_gpu_stored_blocks
        return followed

    def _last_words(self, how: int) -> None:
        """Let it publish a part of its changes, and the follower read some, or all again."""
        for candidate in self.engines:
            self.publisher.publish(candidate, how)
        if how >= 3:
            self._read_again(how)
        self._read(how)

    def _die(self, *, with_store: bool) -> None:
        if with_store:  # it goes on from wherever the follower is, and the new store is empty
            for candidate in list(self.begun):  # the last thing that was read, and not all of it
                self._end_snapshot(candidate)
            self.store = SharedStore()
        else:
            self._follow_to_the_end()
        self.leader = self.follower
        self.publisher = Leader(self.leader, self.store)
        for candidate, shared in self.leader.shared.items():
            self.leader.index.journal(candidate, on=True)
            direct = self.leader.follow_engine(candidate)
            position, status = shared.position, shared.status()
            if position is None or not direct.resume(position, status, now_s=0.0):
                self.leader.index.clear(candidate)
                self.begun_anew.add(candidate)
            direct.connected()
            if with_store:
                self.publisher.rewrite(candidate)
        self.leader.shared = {}
        self._join()


def stream_id_of(candidate: CandidateId) -> StreamId:
    """Name a candidate's stream."""
    return StreamId(f"{candidate}#0")


def candidate_of(stream_id: StreamId) -> CandidateId:
    """Name a stream's candidate."""
    return CandidateId(stream_id.partition("#")[0])


BACKENDS: list[Callable[[Mapping[CandidateId, PlayedEngine]], Backend]] = [
    LocalIndex,
    FollowedIndex,
    ResumedIndex,
]
"""In memory; those that need a Redis are in `redis_backend`. `conftest` gives all of them."""
