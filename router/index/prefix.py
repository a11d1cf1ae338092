"""How many leading blocks of a chain are held, without walking the chain.

Prefix closure: a candidate that has block n has the blocks before it. So the end of a prefix is
found by bisecting. Closure can break: a tier may evict in another order, and events may be lost.
Therefore all blocks of a short prefix are checked. Of a long prefix the blocks right before its end
are checked; if one is missing, the search continues before it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from router.base.contracts import BlockKey


class PrefixEnd(NamedTuple):
    """The end of a candidate's prefix: the keys that show whether another prefix ends there,
    too."""

    num_blocks: int
    last: BlockKey
    following: int  # -1 at the chain's end: no key, never held
    before_last: BlockKey  # two blocks more, for closure can break right before the end
    before_that: BlockKey


NO_END = PrefixEnd(0, BlockKey(-1), -1, BlockKey(-1), BlockKey(-1))
MAX_SHORT = 64
"""Prefixes up to this length are checked block by block, which takes 1.5 us."""

_MAX_ENDS = 12  # a bisection of 6,000 blocks costs as much as trying so many


def _prefix_end(chain: Sequence[BlockKey], num_blocks: int) -> PrefixEnd:
    return PrefixEnd(
        num_blocks,
        chain[num_blocks - 1],
        chain[num_blocks] if num_blocks < len(chain) else -1,
        chain[max(0, num_blocks - 2)],
        chain[max(0, num_blocks - 3)],
    )


def leading(chain: Sequence[BlockKey], held: Container[BlockKey], ends: list[PrefixEnd]) -> int:
    """Count leading blocks in `held`; mostly moves the end that it found to the front of `ends`."""
    if chain[0] not in held:
        return 0
    low, high = 1, len(chain)  # blocks [0, low) are held; none from `high` on is
    for position, (num_blocks, last, following, before_last, before_that) in enumerate(ends):
        if num_blocks < low or num_blocks > high:
            continue
        if last not in held:
            high = num_blocks - 1
        elif following in held:
            low = num_blocks + 1
        elif before_last in held and before_that in held:
            if num_blocks <= MAX_SHORT:
                return num_leading_exactly(chain[:num_blocks], held)
            if position:
                ends.insert(0, ends.pop(position))
            return num_blocks
    low = _bisect(chain, held, low, high)
    if len(ends) < _MAX_ENDS:
        ends.insert(0, _prefix_end(chain, low))
    return _checked(chain, held, low)


def _bisect(chain: Sequence[BlockKey], held: Container[BlockKey], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


def num_leading_exactly(chain: Sequence[BlockKey], held: Container[BlockKey]) -> int:
    """Count leading blocks in `held`, one by one: 0.03 us each."""
    if all(map(held.__contains__, chain)):
        return len(chain)
    return next(position for position, key in enumerate(chain) if key not in held)


def _checked(chain: Sequence[BlockKey], held: Container[BlockKey], end: int, start: int = 0) -> int:
    """Search for a hole in the blocks [start, end) if they are few, else in the last ones.

    There may be other holes further in front.
    """
    if end - start <= MAX_SHORT:
        return start + num_leading_exactly(chain[start:end], held)
    for position in range(end - 3, end - 1):
        if chain[position] not in held:
            return _checked(chain, held, _bisect(chain, held, start + 1, position), start)
    return end


def prolonged(
    chain: Sequence[BlockKey], start: int, tier: Container[BlockKey], *others: Container[BlockKey]
) -> int:
    """Count leading blocks in any of the tiers; the first `start` are known to be there.

    If `tier` lacks the block at `start`, no other tier has it either.
    """
    if start == len(chain) or chain[start] not in tier:
        return start
    held = Either(tier, *others)
    return _checked(chain, held, _bisect(chain, held, start + 1, len(chain)), start)


class Either:
    """Blocks in any of the given tiers."""

    __slots__ = ("tiers",)

    def __init__(self, *tiers: Container[BlockKey]) -> None:
        self.tiers = tiers

    def __contains__(self, key: object) -> bool:
        for tier in self.tiers:  # any() takes three times as long
            if key in tier:
                return True
        return False
