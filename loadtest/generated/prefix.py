"""A prompt that grows, as block ids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Self


class Prefix:
    """What a conversation has said so far: tokens, and an id for each full block of them.

    Ids come from `fresh`, which all prefixes of a workload share: what is grown is new. A last
    block that is partial has another id in every prompt, because it is another block each time.
    """

    __slots__ = ("_fresh", "_ids", "block_size", "num_tokens")

    def __init__(self, block_size: int, fresh: Iterator[int] | None = None) -> None:
        self.block_size = block_size
        self.num_tokens = 0
        self._fresh = count() if fresh is None else fresh
        self._ids: list[int] = []

    def grow(self, num_tokens: int) -> Self:
        """Append new blocks to the prompt."""
        self.num_tokens += num_tokens
        self._ids += islice(self._fresh, self.num_tokens // self.block_size - len(self._ids))
        return self

    def fork(self) -> Prefix:
        """Go on in two ways: full blocks are shared, what follows is not."""
        other = Prefix(self.block_size, self._fresh)
        other.num_tokens = self.num_tokens
        other._ids = list(self._ids)
        return other

    def prompt(self) -> tuple[int, ...]:
        """Name all of it, the last block possibly partial."""
        if self.num_tokens % self.block_size:
            return (*self._ids, next(self._fresh))
        return tuple(self._ids)
