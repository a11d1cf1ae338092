"""Which variant owns which part of the traffic, as shares change: a line of a million points.

A session (or a time slot) is a point on the line, drawn by a salted hash; the line is laid out
among the variants. When shares change, a variant that shrinks gives up its last points, and one
that grows takes them: as few points change hands as possible, and while no variant shrinks, none of
a growing experiment changes from one variant to another. So the layout depends on the shares
before; all of them are part of an experiment's state, and every router has the same layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from router.experiments.definition import UNIT

NO_ARM = -1
"""Owner of points that no arm has (yet)."""


class Layout:
    """Half-open parts of [0, UNIT), each with its owner; immutable.

    Args:
        size: Points that may be given out; those from there to UNIT are the holdout.
    """

    __slots__ = ("_owners", "_starts", "size")

    def __init__(self, size: int, parts: Iterable[tuple[int, int]] = ((0, NO_ARM),)) -> None:
        self.size = size
        laid = list(parts)
        self._starts = [start for start, _ in laid]
        self._owners = [owner for _, owner in laid]

    def owner(self, point: int) -> int:
        """Find the arm at a point, NO_ARM where there is none; O(log parts)."""
        if point >= self.size:
            return NO_ARM
        return self._owners[bisect_right(self._starts, point) - 1]

    def moved(self, shares: Sequence[float]) -> Layout:
        """Lay out for new shares, arm by arm, with the fewest changes."""
        wanted = [round(share * UNIT) for share in shares]
        has = self.counts(len(wanted))
        parts = self._given_up([max(0, h - w) for h, w in zip(has, wanted, strict=True)])
        missing = [max(0, w - h) for h, w in zip(has, wanted, strict=True)]
        return Layout(self.size, _joined(_taken(parts, missing)))

    def equals(self) -> tuple[int, ...]:
        """Name the arms, in order, where they have all points in equal parts; else none.

        Equal but for the points that do not divide.
        """
        counts: dict[int, int] = {}
        for start, end, owner in self._parts():
            counts[owner] = counts.get(owner, 0) + end - start
        rest = counts.pop(NO_ARM, 0)
        arms = tuple(sorted(counts))
        return arms if rest < len(arms) and len(set(counts.values())) == 1 else ()

    def counts(self, num_arms: int) -> list[int]:
        """Count the points of each arm."""
        counts = [0] * num_arms
        for start, end, owner in self._parts():
            if owner != NO_ARM:
                counts[owner] += end - start
        return counts

    def _parts(self) -> list[tuple[int, int, int]]:
        ends = (*self._starts[1:], self.size)
        return list(zip(self._starts, ends, self._owners, strict=True))

    def _given_up(self, surplus: list[int]) -> list[tuple[int, int, int]]:
        """Free the surplus of each arm, from the end of the line."""
        parts: list[tuple[int, int, int]] = []
        for start, end, owner in reversed(self._parts()):
            freed = min(surplus[owner], end - start) if owner != NO_ARM else 0
            if freed:
                surplus[owner] -= freed
                parts.append((end - freed, end, NO_ARM))
            if start < end - freed:
                parts.append((start, end - freed, owner))
        return parts[::-1]


def _taken(parts: list[tuple[int, int, int]], missing: list[int]) -> list[tuple[int, int]]:
    """Give free points to arms that miss some, from the beginning of the line."""
    laid: list[tuple[int, int]] = []
    arm = 0
    for start, end, owner in parts:
        if owner != NO_ARM:
            laid.append((start, owner))
            continue
        while start < end:
            while arm < len(missing) and not missing[arm]:
                arm += 1
            if arm == len(missing):
                laid.append((start, NO_ARM))
                break
            num = min(missing[arm], end - start)
            missing[arm] -= num
            laid.append((start, arm))
            start += num
    return laid


def _joined(laid: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours of one owner."""
    joined: list[tuple[int, int]] = []
    for start, owner in laid:
        if not joined or joined[-1][1] != owner:
            joined.append((start, owner))
    return joined
