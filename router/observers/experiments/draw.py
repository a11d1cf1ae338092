"""Which variant owns which part of the traffic, computed from the shares alone.

A session (or a time slot) is a point on a line of a million points, drawn by a salted hash. Each
variant has a lane of equal length. It fills its own lane from the start; a share larger than the
lane continues in free parts of the other lanes. So a share that grows within its lane moves no
session from one variant to another.

Time slots are numbered from the unix epoch, so every router is in the same slot without asking.
Slots of variants with equal shares are drawn in permuted blocks: each k slots in a row have each of
k variants once, in random order. So the hour of the day cancels when two slots of a block are
compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import floor

from policies.hashing import draw
from router.config.experiments import UNIT


class ArmLayout:
    """The line, laid out for the variants' shares; immutable.

    `blocks` are the variants if they have equal shares of the whole line, else none.
    """

    __slots__ = ("_owners", "_starts", "blocks", "size")

    def __init__(self, shares: Sequence[float], holdout: float) -> None:
        self.size = UNIT - round(holdout * UNIT)
        wanted = [round(share * UNIT) for share in shares]
        lane = self.size // len(wanted)
        extra = [(variant, num - lane) for variant, num in enumerate(wanted) if num > lane]
        parts: list[tuple[int, int | None]] = []
        for variant, num in enumerate(wanted):
            start = variant * lane
            end = self.size if variant == len(wanted) - 1 else start + lane
            parts.append((start, variant))
            start += min(num, lane)
            while extra and start < end:
                other, missing = extra.pop(0)
                taken = min(missing, end - start)
                parts.append((start, other))
                start += taken
                if taken < missing:
                    extra.insert(0, (other, missing - taken))
            if start < end:
                parts.append((start, None))
        self._starts = [start for start, _ in parts]
        self._owners = [owner for _, owner in parts]
        variants = tuple(variant for variant, num in enumerate(wanted) if num)
        is_equal = len(set(wanted) - {0}) == 1 and self.size - sum(wanted) < len(variants)
        self.blocks = variants if is_equal else ()

    def owner(self, point: int) -> int | None:
        """Return the variant at a point; None: the point is in no variant."""
        if point >= self.size:
            return None
        return self._owners[bisect_right(self._starts, point) - 1]


def slot_of(at_s: float, slot_s: float) -> int:
    """Return the number of the slot at a time."""
    return floor(at_s / slot_s)


def place_in_block(slot: int, size: int, seed: int) -> int:
    """Draw a slot's place in the order of its block (Fisher-Yates shuffle)."""
    block, index = divmod(slot, size)
    places = list(range(size))
    for last in range(size - 1, 0, -1):
        other = draw(seed, block, last) * (last + 1) >> 64
        places[last], places[other] = places[other], places[last]
    return places[index]
