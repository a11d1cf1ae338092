"""Blocks of one candidate on one tier, with their number of copies, and how far a chain is held.

Blocks are a plain dict; here are its operations.

A set would be wrong: vLLM does not de-duplicate equal blocks. It stores, and later removes, each
copy with an event of its own. A dict of ints is also invisible to the cyclic collector. A
removal may tell how many copies are left (an open change: vllm-project/vllm#48933).

`RecentKeys` has blocks that were removed recently: if they were removed after a prediction, it was
not wrong. `StagedBlocks` are a candidate's blocks while they are loaded. A million blocks take most
of a second to load. They are loaded slice by slice, apart from the blocks that are matched, so that
no request sees half of them. Then `BlockIndex.replace` swaps them in.

A chain is not walked to find how many leading blocks of it are held. Prefix closure: a candidate
that has block n has the blocks before it. So the end of a prefix is found by bisecting. Closure can
break: a tier may evict in another order, and events may be lost. Therefore all blocks of a short
prefix are checked. Of a long prefix the blocks right before its end are checked; if one is missing,
the search continues before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import islice, repeat
from time import monotonic
from typing import Final, Literal, NamedTuple, get_args

from router.base.contracts import BlockKey
from router.base.messages import TierChange, unpack_keys

MAX_KEYS: Final = 8_192  # in a generation; half a megabyte, or 1.5 of one key a call


class _Stamp(NamedTuple):
    """One call of `add`; its keys share it."""

    number: int
    at_s: float


_NEVER: Final = _Stamp(0, 0.0)


class RecentKeys:
    """The last keys added: at least `max_keys` of them, at most twice as many.

    `num_added` counts the calls of `add`. It serves as a clock for `since`.
    """

    __slots__ = ("_max_keys", "_new", "_old", "num_added")

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: dict[BlockKey, _Stamp] = {}
        self._old: dict[BlockKey, _Stamp] = {}
        self.num_added = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._new or key in self._old

    def since(self, key: BlockKey, num_added: int) -> bool:
        """Return whether the key was last added after `num_added` calls of `add`."""
        return self._last(key).number > num_added

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add keys; 0.03 us each."""
        self.num_added += 1
        self._new.update(dict.fromkeys(keys, _Stamp(self.num_added, monotonic())))
        if len(self._new) >= self._max_keys:
            self._old, self._new = self._new, {}

    def added_s(self, key: BlockKey) -> float | None:
        """Return when the key was last added, monotonic; None: it is not known any more."""
        last = self._last(key)
        return None if last is _NEVER else last.at_s

    def _last(self, key: BlockKey) -> _Stamp:
        return self._new.get(key, self._old.get(key, _NEVER))


Tier = Literal["gpu", "cpu"]

TIERS: tuple[Tier, ...] = get_args(Tier)

_MANY: Final = 8
_ONLY_ONE: Final = frozenset({1})

Copies = dict[BlockKey, int]
"""Never 0: a block without a copy is not in it."""


def add(copies: Copies, keys: Sequence[BlockKey]) -> None:
    """Add one copy of each block."""
    new = dict.fromkeys(keys, 1)
    if len(new) == len(keys) and copies.keys().isdisjoint(new):
        copies.update(new)  # the usual case, four times as fast
        return
    get = copies.get
    for key in keys:
        copies[key] = get(key, 0) + 1


def remove(copies: Copies, keys: Sequence[BlockKey], lowered: set[BlockKey] | None = None) -> int:
    """Remove one copy of each block; return how many were not there.

    Blocks that had more than one are added to `lowered`.
    """
    if len(keys) >= _MANY and {*map(copies.get, keys)} == _ONLY_ONE:
        num_before = len(copies)
        deque(map(copies.pop, keys, repeat(0)), maxlen=0)  # the usual case, twice as fast
        return len(keys) - (num_before - len(copies))
    num_missing = 0
    for key in keys:
        count = copies.get(key, 0)
        if count > 1:
            copies[key] = count - 1
            if lowered is not None:
                lowered.add(key)
        elif count:
            del copies[key]
        else:
            num_missing += 1
    return num_missing


def remove_to(
    copies: Copies,
    keys: Iterable[BlockKey],
    num_left: Iterable[int | None],
    lowered: set[BlockKey],
) -> int:
    """Set how many copies of each block are left; return how many blocks were not there.

    None: one less. Blocks that have some left are added to `lowered`.
    """
    num_missing = 0
    for key, left in zip(keys, num_left, strict=False):
        count = copies.get(key, 0)
        num_missing += not count
        if left is None:
            left = count - 1
        if left > 0:
            copies[key] = left
            lowered.add(key)
        else:
            copies.pop(key, None)
    return num_missing


def drop_oldest(copies: Copies, num_blocks: int) -> list[BlockKey]:
    """Drop the oldest blocks, all copies of them; return them."""
    dropped = list(islice(copies, num_blocks))
    for key in dropped:
        del copies[key]
    return dropped


class StagedBlocks:
    """Blocks of one candidate that are not matched yet."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[Tier, Copies] = {tier: {} for tier in TIERS}

    def apply(self, change: TierChange) -> int:
        """Apply a change; return how many keys it names. Takes 0.1 us a block."""
        assert change.tier != "pool"
        held = self.copies[change.tier]
        removed, stored = unpack_keys(change.removed), unpack_keys(change.stored)
        for key in removed:
            held.pop(key, None)
        held.update(dict.fromkeys(stored, 1))
        held.update(change.copies)
        return len(removed) + len(stored)

    def take(self) -> dict[Tier, Copies]:
        """Return all blocks, and keep none."""
        copies, self.copies = self.copies, {tier: {} for tier in TIERS}
        return copies

    def num_blocks(self, tier: Tier = "gpu") -> int:
        """Count distinct blocks."""
        return len(self.copies[tier])


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


def num_common_blocks(one: Sequence[BlockKey], other: Sequence[BlockKey], least: int = 0) -> int:
    """Count the leading blocks that two chains have in common; 0 if fewer than `least`.

    Bisects: a key stands for all blocks before it, too.
    """
    low, high = least, min(len(one), len(other))
    if low > high or (low and one[low - 1] != other[low - 1]):
        return 0
    if high and one[high - 1] == other[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
