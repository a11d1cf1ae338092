"""Blocks of one candidate on one tier with their number of copies: the operations on a plain dict.

A set would be wrong: vLLM does not de-duplicate equal blocks. It stores, and later removes, each
copy with an event of its own. A dict of ints is also invisible to the cyclic collector. A
removal may tell how many copies are left (an open change: vllm-project/vllm#48933).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import Final, Literal, get_args

from router.base.contracts import BlockKey

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
