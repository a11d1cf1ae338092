"""The shared pool of a simulated fleet: what it holds, and the bandwidth that readers share.

What must live here: blocks with eviction by last use, as `loadtest.emulator.pool` keeps objects;
reads in progress and how fast each is. What must not: who reads what when (engine).

Two limits, fairly shared: each replica's link, among its own reads; and the pool's links together,
among the replicas that read. All links are alike, so every reading replica gets the same:

    rate of one read = min(link, all links / reading replicas) / reads of that replica

Writing is free: vLLM's connector does it in the background, after the first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from router.contracts import BlockKey

T = TypeVar("T")


class Pool:
    """Blocks, the least recently used out first; a look-up by an engine is a use.

    Args:
        capacity_blocks: None: it is never full.
    """

    __slots__ = ("_blocks", "_capacity_blocks", "num_evicted", "num_stored")

    def __init__(self, capacity_blocks: int | None = None) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()
        self.num_evicted = 0
        self.num_stored = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[BlockKey]) -> int:
        """Count leading blocks that are there, as a router does: without touching them."""
        blocks = self._blocks
        for number, key in enumerate(chain):
            if key not in blocks:
                return number
        return len(chain)

    def leading(self, chain: Sequence[BlockKey]) -> int:
        """Count leading blocks that are there, and touch them."""
        num_blocks = self.match(chain)
        for key in chain[:num_blocks]:
            self._blocks.move_to_end(key)
        return num_blocks

    def store(self, keys: Iterable[BlockKey]) -> None:
        """Write blocks; what is there already is only touched."""
        blocks = self._blocks
        num_before = len(blocks)
        for key in keys:
            blocks[key] = None
            blocks.move_to_end(key)
        self.num_stored += len(blocks) - num_before
        if self._capacity_blocks is not None:
            while len(blocks) > self._capacity_blocks:
                blocks.popitem(last=False)
                self.num_evicted += 1


class Read(Generic[T]):
    """One request's read: tokens left as of the last change of rates."""

    __slots__ = ("num_tokens_left", "replica", "request")

    def __init__(self, replica: int, request: T, num_tokens: int) -> None:
        self.replica = replica
        self.request = request
        self.num_tokens_left = float(num_tokens)


class Reads(Generic[T]):
    """Reads in progress; `now_s` never goes back.

    Args:
        link_tokens_per_s: What one replica can read.
        num_links: How many replicas can read so fast at once.
    """

    __slots__ = ("_at_s", "_by_replica", "_link", "_num_links", "num_tokens", "version")

    def __init__(self, link_tokens_per_s: float, num_links: float) -> None:
        self._link = link_tokens_per_s
        self._num_links = num_links
        self._by_replica: dict[int, list[Read[T]]] = {}
        self._at_s = 0.0
        self.num_tokens = 0  # of all reads, from their beginning
        self.version = 0  # counts changes of rates

    def begin(self, replica: int, request: T, num_tokens: int, now_s: float) -> None:
        """Start to read `num_tokens` tokens for a request."""
        self._advance(now_s)
        self.version += 1
        self._by_replica.setdefault(replica, []).append(Read(replica, request, num_tokens))
        self.num_tokens += num_tokens

    def next_s(self) -> float | None:
        """Return when the next read is done if none begins before; None: none is in progress."""
        if not self._by_replica:
            return None
        share = self._share()
        return self._at_s + min(
            min(read.num_tokens_left for read in reads) * len(reads) / share
            for reads in self._by_replica.values()
        )

    def finish(self, now_s: float) -> list[Read[T]]:
        """Take out the reads that are done by now, in the order of replicas and beginnings."""
        self._advance(now_s)
        self.version += 1
        done: list[Read[T]] = []
        if not self._by_replica:
            return done
        rest = max(1e-6, 1e-9 * self._share())  # a nanosecond's worth: the clock has no finer
        for replica in sorted(self._by_replica):
            reads = self._by_replica[replica]
            finished = [read for read in reads if read.num_tokens_left <= rest]
            if finished:
                done += finished
                left = [read for read in reads if read.num_tokens_left > rest]
                if left:
                    self._by_replica[replica] = left
                else:
                    del self._by_replica[replica]
        return done

    def _share(self) -> float:
        return min(self._link, self._link * self._num_links / len(self._by_replica))

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        if not self._by_replica or elapsed_s <= 0.0:
            return
        share = self._share()
        for reads in self._by_replica.values():
            num_tokens = share * elapsed_s / len(reads)
            for read in reads:
                read.num_tokens_left -= num_tokens
