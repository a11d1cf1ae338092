"""The seam of the suite: one way of holding the index, and the backends there are.

A backend receives live batches (or does not: those are lost), and must know everything once it has
settled. What goes wrong inside it at random it does itself, in `disturb`.

All calls are plain ones. A backend whose index answers asynchronously owns an `asyncio.Runner` and
runs its coroutines in it; `close` closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import StreamId
from router.index.block_index import BlockIndex, BlockMatch
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
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

    def follow_engine(self, candidate: CandidateId) -> RankStream:
        stream = RankStream(candidate, self.index, block_size=BLOCK_SIZE, capacity_blocks=CAPACITY)
        self.direct[candidate] = stream
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


def stream_id_of(candidate: CandidateId) -> StreamId:
    """Name a candidate's stream."""
    return StreamId(f"{candidate}#0")


BACKENDS: list[Callable[[Mapping[CandidateId, PlayedEngine]], Backend]] = [
    LocalIndex,
]
"""In memory; those that need a Redis are in `redis_backend`. `conftest` gives all of them."""
