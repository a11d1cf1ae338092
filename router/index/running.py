"""Count the blocks that the running requests of one candidate have in use.

An engine cannot evict these, so a prompt begins once the other blocks suffice for it. Two chains
have only leading blocks in common. So a block that several requests use is counted for one of
them, and the blocks counted for a request are the rest of its chain, from one block on.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.base.contracts import BlockKey
from router.index.copies import num_common_blocks


class Use:
    """One request's use of a cache. Blocks before `start` are counted for other requests."""

    __slots__ = ("keys", "start")

    def __init__(self, keys: Sequence[BlockKey], start: int) -> None:
        self.keys = keys
        self.start = start


class Running:
    """The requests that run at one candidate. `begin` and `end` take O(k + log n) for k of them."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: set[Use] = set()

    def __len__(self) -> int:
        return len(self._uses)

    def num_in_use(self) -> int:
        """Count the distinct blocks of prompts, and for each answer one block that is not full."""
        return sum([len(use.keys) - use.start + 1 for use in self._uses])

    def num_shared(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading blocks of a chain that are in use."""
        num_blocks = 0
        for other in self._uses:
            num_blocks = max(num_blocks, num_common_blocks(keys, other.keys, num_blocks))
        return num_blocks

    def begin(self, keys: Sequence[BlockKey]) -> Use:
        """Begin a request: the full blocks of its prompt are in use."""
        use = Use(keys, self.num_shared(keys))
        self._uses.add(use)
        return use

    def end(self, use: Use) -> None:
        """End a request; a second time does nothing.

        What others use, too, is counted for the one that shares most, from now on.
        """
        if use not in self._uses:
            return
        self._uses.remove(use)
        heir, best = use, (use.start, 0)
        for other in self._uses:
            found = num_common_blocks(use.keys, other.keys, best[0]), -other.start
            if found > best:
                heir, best = other, found
        heir.start = use.start
