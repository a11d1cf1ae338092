"""What an engine will have evicted by the time it comes to a request that is sent to it now.

An engine looks a prompt up when it schedules it. Those in front of it take blocks meanwhile, from
the front of a queue of free ones (source: vllm/v1/core/{block_pool,kv_cache_utils,kv_cache_manager}
.py, 0.32.0): a request's blocks join its end when the request is over, the last of its chain first,
and a hit takes them out. No event tells that order, but the requests that were sent there do.

What must live here: the order of last use, and which blocks go next. What must not: what is held
and how much room there is (router.index.cache_view), who is sent where.

A block belongs to a request that runs and has it, or else to the last one that had it. As chains
part for good where they part, what belongs to a request is the rest of its chain from some block
on. That block names it in `_first`, so a chain finds who has blocks of it by walking along itself.

Falls short: blocks of replies have no name here until the next prompt has them, so what an old
conversation's last reply gives first is charged to the blocks before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import islice
from typing import Final, NamedTuple

from router.contracts import BlockKey
from router.index.prefix import num_leading

_NUM_LOOKS: Final = 4  # at the oldest, with every request that begins: more leave than come


class Use:
    """One request's use of a cache."""

    __slots__ = ("keys", "start")

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = keys
        self.start = 0  # the blocks before it belong to other requests


class FirstLost(NamedTuple):
    """The first block of a chain that will be gone, and how many blocks stand before it."""

    num_blocks: int
    key: BlockKey


class EvictionOrder:
    """The requests that used one candidate's cache, in the order in which it gives them up.

    `begin` and `end` take O(k log n) for k chains that this one has blocks in common with.
    """

    __slots__ = ("_first", "_over", "_running")

    def __init__(self) -> None:
        self._first: dict[BlockKey, Use] = {}  # by the first block that belongs to them
        self._running: dict[Use, None] = {}
        self._over: dict[Use, None] = {}  # the first to be evicted first

    def __len__(self) -> int:
        return len(self._over)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, keys: Sequence[BlockKey], held: Container[BlockKey]) -> Use:
        """Note a request that is sent: its prompt's full blocks are in use.

        `held`: what the candidate holds; who has lost everything is forgotten.
        """
        for use in list(islice(self._over, _NUM_LOOKS)):
            if use.keys[use.start] not in held:
                self._shrink(use, len(use.keys))
        use = Use(keys)
        self._take(use)
        self._running[use] = None
        return use

    def end(self, use: Use) -> None:
        """Note that a request is over, however it ended; once more has no effect."""
        if use in self._running:
            del self._running[use]
            self._shrink(use, len(use.keys))
            self._take(use)
            if use.start < len(use.keys):
                self._over[use] = None

    def lost(self, num_blocks: int, held: Container[BlockKey]) -> tuple[FirstLost, ...]:
        """Return where chains will end once so many blocks are evicted.

        O(chains that lose any x requests that run): blocks that these have, too, are kept.
        """
        found = []
        for use in self._over:
            start = self._num_in_use(use)
            end = num_leading(use.keys, held, start)
            if end == start:
                continue
            kept = max(start, end - num_blocks)
            found.append(FirstLost(kept, use.keys[kept]))
            num_blocks -= end - kept
            if num_blocks <= 0:
                break
        return tuple(found)

    def _take(self, use: Use) -> None:
        """Give a request its blocks, those that belong to one that runs left out."""
        keys, first = use.keys, self._first
        position = start = 0
        while position < len(keys) and (other := first.get(keys[position])) is not None:
            position = _num_common(keys, other.keys, position + 1)
            if other in self._over:
                self._shrink(other, position)
            else:
                start = position
        use.start = start
        if start < len(keys):
            first[keys[start]] = use

    def _shrink(self, use: Use, start: int) -> None:
        """Leave to a request what comes from block `start` on."""
        keys, first = use.keys, self._first
        if use.start < len(keys) and first.get(keys[use.start]) is use:
            del first[keys[use.start]]
        use.start = start
        if start < len(keys):
            first[keys[start]] = use
        else:
            self._over.pop(use, None)

    def _num_in_use(self, use: Use) -> int:
        """Count the leading blocks of a request that is over which others have in use."""
        start = use.start
        for other in self._running:
            keys = other.keys
            if start < len(use.keys) and start < len(keys) and keys[start] == use.keys[start]:
                start = _num_common(keys, use.keys, start + 1)
        return start


def _num_common(one: Sequence[BlockKey], other: Sequence[BlockKey], start: int) -> int:
    """Count the leading blocks that two chains share; the first `start` are known to be."""
    most = min(len(one), len(other))
    if one[most - 1] == other[most - 1]:  # a key stands for all before it, too
        return most
    return bisect_left(range(most), True, start, key=lambda at: one[at] != other[at])
