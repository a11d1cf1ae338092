"""How many leading blocks of a chain are held, without walking the chain.

Prefix closure: a candidate that has block n has the blocks before it. So the end of a prefix is
found by bisecting. Closure can break: a tier may evict in another order, and events may be lost.
Therefore all blocks of a short prefix are checked. Of a long prefix the blocks right before its end
are checked; if one is missing, the search continues before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import compress, islice
from typing import NamedTuple, overload

from router.contracts import BlockKey


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


def num_leading(chain: Sequence[BlockKey], held: Container[BlockKey], start: int = 0) -> int:
    """Count leading blocks in `held`, assuming the first `start`; holes are not searched for."""
    return _bisect(chain, held, start, len(chain))


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


class Chain:
    """A prompt's units, with lookups that several candidates share."""

    __slots__ = ("_ends", "_landmarks", "_rows", "keys")

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = keys  # first first
        self._ends: dict[tuple[int, int], list[PrefixEnd]] = {}
        self._landmarks: dict[tuple[int, int, int], _Landmarks] = {}
        self._rows: dict[tuple[int, int, int, int], list[BlockKey]] = {}

    def num_leading(self, held: Container[BlockKey], salt: int, size: int) -> int:
        """Count the leading blocks of one group of full attention."""
        keys = self.of_group(salt, size)
        return leading(keys, held, self._ends.setdefault((salt, size), [])) if keys else 0

    def of_group(self, salt: int, size: int) -> Sequence[BlockKey]:
        """Return the keys of one group's blocks."""
        return self.keys if not salt and size == 1 else _GroupChain(self.keys, salt, size)

    def row(self, salt: int, size: int, start: int, end: int) -> list[BlockKey]:
        """Return the keys of one group's blocks [start, end)."""
        at = salt, size, start, end
        if at not in self._rows:
            self._rows[at] = self.of_group(salt, size)[start:end]  # type: ignore[assignment]
        return self._rows[at]

    def landmarks(self, salt: int, size: int, spacing: int) -> _Landmarks:
        """Return every `spacing`-th block of one group, and the first one."""
        at = salt, size, spacing
        if at not in self._landmarks:
            numbers = [*range(spacing, len(self.keys) // size + 1, spacing)]
            if spacing > 1 and len(self.keys) >= size:
                numbers.insert(0, 1)
            self._landmarks[at] = _Landmarks(
                numbers, [BlockKey(self.keys[number * size - 1] ^ salt) for number in numbers]
            )
        return self._landmarks[at]


class _Landmarks(NamedTuple):
    """Blocks by their number (the first is 1), and their keys: each row includes one of them."""

    numbers: list[int]
    keys: list[BlockKey]

    def last(self, held: Container[BlockKey], limit: int) -> int:
        """Return the last one up to number `limit` that is held; 0: none."""
        num = bisect_right(self.numbers, limit)
        tiers = held.tiers if isinstance(held, Either) else (held,)
        # compress and map: a loop takes eight times as long
        skip = len(self.keys) - num
        return max(
            next(
                compress(
                    islice(reversed(self.numbers), skip, None),
                    map(tier.__contains__, islice(reversed(self.keys), skip, None)),
                ),
                0,
            )
            for tier in tiers
        )


class _GroupChain(Sequence[BlockKey]):
    """The keys of one group's blocks of a chain, computed on access."""

    __slots__ = ("_chain", "_salt", "_size")

    def __init__(self, chain: Sequence[BlockKey], salt: int, size: int) -> None:
        self._chain = chain
        self._salt = salt
        self._size = size

    def __len__(self) -> int:
        return len(self._chain) // self._size

    @overload
    def __getitem__(self, position: int) -> BlockKey: ...
    @overload
    def __getitem__(self, position: slice) -> list[BlockKey]: ...
    def __getitem__(self, position: int | slice) -> BlockKey | list[BlockKey]:
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        return BlockKey(self._chain[(position + 1) * self._size - 1] ^ self._salt)
