"""A pool of blocks that replicas share: which blocks it has, and which are evicted next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any


class BlockPool:
    """Blocks with eviction by last use; a look-up by an engine is a use.

    Args:
        capacity_blocks: None: unlimited.
    """

    def __init__(self, capacity_blocks: int | None = None) -> None:
        self.capacity_blocks = capacity_blocks
        self.num_evicted = 0
        self.num_put = 0
        self._blocks: OrderedDict[Any, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> list[Any]:
        """List all blocks, the next to be evicted first."""
        return list(self._blocks)

    def holds(self, keys: Iterable[Any]) -> list[bool]:
        """Return which blocks are in the pool; this is no use of them."""
        return [key in self._blocks for key in keys]

    def match(self, keys: Sequence[Any]) -> int:
        """Count the leading blocks that are in the pool, as a router does; this is no use."""
        blocks = self._blocks
        for number, key in enumerate(keys):
            if key not in blocks:
                return number
        return len(keys)

    def leading(self, keys: Sequence[Any]) -> int:
        """Count the leading blocks that are in the pool, as an engine does, and use them."""
        num_blocks = self.match(keys)
        for key in keys[:num_blocks]:
            self._blocks.move_to_end(key)
        return num_blocks

    def put(self, keys: Iterable[Any]) -> list[Any]:
        """Store blocks; return those that are new, and use the others."""
        blocks, new = self._blocks, []
        for key in keys:
            if key not in blocks:
                new.append(key)
            blocks[key] = None
            blocks.move_to_end(key)
        self.num_put += len(new)
        if self.capacity_blocks is not None:
            while len(blocks) > self.capacity_blocks:
                blocks.popitem(last=False)
                self.num_evicted += 1
        return new

    def remove(self, keys: Iterable[Any]) -> None:
        """Remove blocks."""
        for key in keys:
            self._blocks.pop(key, None)

    def clear(self) -> None:
        """Remove all blocks; none counts as evicted."""
        self._blocks.clear()
