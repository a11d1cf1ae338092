"""The rule of each kind of KV group: from which lengths of a prompt it can go on.

What must live here: one rule for each kind, and the lookups that they share. What must not: how the
rules combine (router.index.hit_length), events, tiers.

Lengths are in units, and aligned when they are returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import compress, islice
from typing import NamedTuple, overload

from router.base.contracts import BlockKey
from router.index.prefix import Either, PrefixEnd, leading


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


class GroupKind:
    """Groups of one rule, which must all hold a block.

    Args:
        size: Units of a block.
        salts: One for each group.
        alignment: Units.
    """

    __slots__ = ("alignment", "drops", "margin", "salts", "size")

    def __init__(self, size: int, salts: Sequence[int], alignment: int) -> None:
        self.size = size
        self.salts = salts
        self.alignment = alignment
        self.drops = False  # a block, for EAGLE
        self.margin = 0  # units that may be matched beyond a hit, to be dropped

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        """Find the longest aligned length up to `bound` from which these groups can go on."""
        raise NotImplementedError

    def needed(self, chain: Sequence[BlockKey], length: int) -> list[BlockKey]:
        """List the blocks that a hit of this length needs, without those of salt 0."""
        ends = self._needed(length)
        if self.drops and length and length + self.size <= len(chain):  # the block that proves it
            ends = range(ends.start, length + self.size + 1, self.size)
        return [BlockKey(chain[at - 1] ^ salt) for salt in self.salts if salt for at in ends]

    def _needed(self, length: int) -> range:
        """Return where the blocks end."""
        return range(self.size, length + 1, self.size)

    def _holds(self, chain: Chain, held: Container[BlockKey], end: int) -> bool:
        """Return whether all groups hold the block that ends there."""
        key = chain.keys[end - 1]
        return all(key ^ salt in held for salt in self.salts)


class Whole(GroupKind):
    """Every block. If it is closed (each block implies those before it), by bisecting."""

    __slots__ = ("is_closed",)

    def __init__(self, size: int, salts: Sequence[int], alignment: int, is_closed: bool) -> None:
        super().__init__(size, salts, alignment)
        self.is_closed = is_closed

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        num_blocks = bound // self.size
        for salt in self.salts:
            if self.is_closed:
                num_blocks = min(num_blocks, chain.num_leading(held, salt, self.size))
            else:
                keys = chain.of_group(salt, self.size)
                missing = (at for at in range(num_blocks) if keys[at] not in held)
                num_blocks = next(missing, num_blocks)
        length = num_blocks * self.size
        if self.alignment < self.size:  # the prompt's last, partial block is stored, too
            ends = range(min(length + self.size - 1, bound), length, -1)
            length = next((end for end in ends if self._holds(chain, held, end)), length)
        if drops and length:
            length -= min(self.alignment, self.size)
        return length - length % self.alignment


class Window(GroupKind):
    """A sliding window: `need` blocks that end on a boundary, or all blocks before it."""

    __slots__ = ("need",)

    def __init__(self, size: int, salts: Sequence[int], alignment: int, need: int) -> None:
        super().__init__(size, salts, alignment)
        self.need = need

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        size, step = self.size, max(1, self.alignment // self.size)
        need = max(1, self.need + drops)  # blocks in a row
        spacing = max(1, self.need)
        landmarks = chain.landmarks(self.salts[0], size, spacing)
        end = bound // size  # of the row, in blocks
        while True:
            end -= (end - drops) % step  # without the dropped one it ends on a boundary
            last = landmarks.last(held, end)
            if not last:
                return 0
            if end >= last + spacing:  # a row that ends there has a later landmark, not held
                end = last + spacing - 1
                continue
            missing = self._missing(chain, held, max(0, end - need), end)
            if missing is None:
                if end < need:  # from the prompt's start: aligned before the drop, and after it
                    end -= end % step
                end -= drops
                return max(0, end - end % step) * size
            end = missing  # each row that ends behind the missing block has it, too

    def _missing(self, chain: Chain, held: Container[BlockKey], start: int, end: int) -> int | None:
        """Return the first of the blocks [start, end) that is missing in a group."""
        rows = [chain.row(salt, self.size, start, end) for salt in self.salts]
        if all(all(map(held.__contains__, row)) for row in rows):
            return None
        missing = (
            position for row in rows for position, key in enumerate(row, start) if key not in held
        )
        return next(missing)

    def _needed(self, length: int) -> range:
        first = max(0, length // self.size - self.need)
        return range((first + 1) * self.size, length + 1, self.size)


class Mamba(GroupKind):
    """Mamba: the state at the boundary. Which states a request keeps depends on its chunks."""

    __slots__ = ()

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        landmarks = chain.landmarks(self.salts[0], self.alignment, 1)
        number = landmarks.last(held, bound // self.alignment)
        while number and not self._holds(chain, held, number * self.alignment):
            number = landmarks.last(held, number - 1)
        return number * self.alignment

    def _needed(self, length: int) -> range:
        return range(length, length + 1) if length else range(0)


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
