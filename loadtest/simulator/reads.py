"""Reads of a simulated fleet from its pool, its CPU tiers, or between replicas: their speed.

What must not live here: who reads what when (engine), which blocks there are (engine_model.pool).

Two limits are shared equally. Each replica's link is shared by its own reads. The links of the pool
are shared by the replicas that read. All links are equal, so every reading replica gets the same:

    rate of one read = min(link, all links / reading replicas) / reads of that replica

Writing is free: vLLM's connector does it in the background, after the first token.
"""

from __future__ import annotations

from typing import Any


class Read:
    """One request's read: tokens left as of the last change of rates."""

    __slots__ = ("num_tokens_left", "replica", "request")

    def __init__(self, replica: int, request: Any, num_tokens: int) -> None:
        self.replica = replica
        self.request = request
        self.num_tokens_left = float(num_tokens)


class Reads:
    """Reads in progress; `now_s` never decreases.

    Args:
        link_tokens_per_s: What one replica can read.
        num_links: How many replicas can read at full speed at once.
    """

    __slots__ = ("_at_s", "_by_replica", "_link", "_num_links", "num_tokens", "version")

    def __init__(self, link_tokens_per_s: float, num_links: float) -> None:
        self._link = link_tokens_per_s
        self._num_links = num_links
        self._by_replica: dict[int, list[Read]] = {}
        self._at_s = 0.0
        self.num_tokens = 0  # of all reads, from their beginning
        self.version = 0  # counts changes of rates

    def begin(self, replica: int, request: Any, num_tokens: int, now_s: float) -> None:
        """Start to read `num_tokens` tokens for a request."""
        self._advance(now_s)
        self.version += 1
        self._by_replica.setdefault(replica, []).append(Read(replica, request, num_tokens))
        self.num_tokens += num_tokens

    def next_s(self) -> float | None:
        """Return when the next read is done unless another begins; None: none is in progress."""
        if not self._by_replica:
            return None
        share = self._share()
        return self._at_s + min(
            min(read.num_tokens_left for read in reads) * len(reads) / share
            for reads in self._by_replica.values()
        )

    def finish(self, now_s: float) -> list[Read]:
        """Remove and return the reads that are done by now, by replica and then beginning."""
        self._advance(now_s)
        self.version += 1
        done: list[Read] = []
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
