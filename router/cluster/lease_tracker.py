"""Which leases of another router are open, from notes that may be late, lost or received twice.

Rules, for a router whose lease numbers grow:

1. A begin is one lease, however often it is received. One whose end was received stays ended.
2. A heartbeat lists what is open up to number `last`. What it does not list is over.
3. What it lists and we do not know was lost on the way: it is *missing* until it comes again.
4. A begin up to `last` that is not missing is an old one: it is over.
5. A load (all that was open at some moment) is joined by begins, then ends what it lacks. It may
   be older or newer than the last heartbeat: rules 1 and 4 hold for it, too.

No I/O, no clock; the values are the caller's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_LEASES: Final = 100_000
"""The most leases of one router that are open at once; more are not tracked."""


class LeaseTracker(Generic[T]):
    """The open leases of one other router, each with the caller's value."""

    __slots__ = ("_ended", "_last", "missing", "open")

    def __init__(self) -> None:
        self.open: dict[int, T] = {}
        self.missing: set[int] = set()  # listed as open, but not known here
        self._last = 0  # of the newest heartbeat or load
        self._ended: set[int] = set()  # whose end came since the newest heartbeat

    def can_begin(self, number: int) -> bool:
        """Return whether a lease is a new one, or its begin an old note."""
        if number in self.open or number in self._ended or len(self.open) >= MAX_LEASES:
            return False
        return number > self._last or number in self.missing

    def begin(self, number: int, value: T) -> None:
        """Open a lease that `can_begin`."""
        self.open[number] = value
        self.missing.discard(number)

    def end(self, number: int) -> T | None:
        """Close a lease; None if it is not open. A later begin of it is an old one."""
        if len(self._ended) < MAX_LEASES:
            self._ended.add(number)
        self.missing.discard(number)
        return self.open.pop(number, None)

    def keep(self, listed: Collection[int], last: int) -> list[T]:
        """Apply a heartbeat; return what is over by it, oldest first."""
        over = self._close_unlisted(listed, last)
        if last >= self._last:  # else an old one, received again
            self._last = last
            self.missing = {n for n in listed if n not in self.open and n not in self._ended}
            # One still listed ended after this heartbeat was made: its begin may come once more.
            self._ended = {n for n in self._ended if n > last or n in listed}
        return over

    def joined(self, listed: Collection[int], last: int) -> list[T]:
        """Apply a load whose leases have been begun; return what is over by it."""
        over = self._close_unlisted(listed, last)
        self.missing = {number for number in self.missing if number > last}
        self._last = max(self._last, last)
        return over

    def _close_unlisted(self, listed: Collection[int], last: int) -> list[T]:
        listed = frozenset(listed)
        over = [number for number in self.open if number <= last and number not in listed]
        return [self.open.pop(number) for number in over]
