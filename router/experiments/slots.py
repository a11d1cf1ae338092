"""Time slots of a switchback, and a wall clock that may be set while they pass.

Slots are numbered from the epoch of unix time, so every router is in the same one without asking.
Where variants have equal shares, slots are drawn in permuted blocks: of k variants, each k slots in
a row (counted from the epoch) have every variant once, in random order. Chance then gives no
variant more slots than another, neither in all nor in some hours, and two variants are compared
pair by pair: what the hour does to both slots of a pair cancels. Any slot is still as likely one
variant's as another's.

Where a router's wall clock is set (by more than NTP's slewing does between two looks), it goes on
in the slot of the new time, as the others; what it decides until that slot is over does not
count.
"""

from __future__ import annotations

from math import floor

from policies.hashing import draw

STEP_S = 1.0
"""Wall time and monotonic time drifting apart by more between two looks is a step. Slewing is
0.5 ms a second at most (ntpd, chronyd's default is less): half an hour without a request is
taken for a step as well, at the price of one slot."""


def slot_of(at_s: float, slot_s: float) -> int:
    """Number the slot that a time is in."""
    return floor(at_s / slot_s)


def place_in_block(slot: int, size: int, seed: int) -> int:
    """Draw a slot's place in the order of its block; the `size` slots of a block have all places.

    Shuffles as Fisher and Yates do: every order is as likely.
    """
    block, index = divmod(slot, size)
    places = list(range(size))
    for last in range(size - 1, 0, -1):
        other = draw(seed, block, last) * (last + 1) >> 64
        places[last], places[other] = places[other], places[last]
    return places[index]


class WallClock:
    """Notices that wall time was set."""

    __slots__ = ("_offset_s", "num_steps", "stepped_at_s")

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self.num_steps = 0
        self.stepped_at_s: float | None = None  # in the new time; None: never

    def look(self, wall_s: float, now_s: float) -> bool:
        """Compare wall time with monotonic time; True: it was set since the last look."""
        offset_s, before_s = wall_s - now_s, self._offset_s
        self._offset_s = offset_s
        if before_s is None or abs(offset_s - before_s) <= STEP_S:
            return False
        self.stepped_at_s = wall_s
        self.num_steps += 1
        return True
