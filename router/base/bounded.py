"""Memory with a bound: maps, queues, and figures about the recent past.

    Bounded        a map of so many entries; the oldest one is evicted
    BoundedBytes   a map whose entries take so many bytes together; the oldest ones are evicted
    Backlog        a queue for a reader that may be slow; its newest or oldest item is dropped

What goes beyond a bound is counted. A map or queue that evicts by another rule (by age, by several
bounds) is kept beside that rule. Figures are O(1): old events fade, none is kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import exp
from typing import Protocol, TypeVar


class HasSize(Protocol):
    """A value that knows its size."""

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        ...


Item = TypeVar("Item")
Key = TypeVar("Key")
Value = TypeVar("Value")
Weighed = TypeVar("Weighed", bound=HasSize)


class Bounded(OrderedDict[Key, Value]):
    """A map that evicts its oldest entries; `put` and `use` make an entry the newest.

    Args:
        most: How many entries it keeps.
    """

    __slots__ = ("most", "num_evicted")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.num_evicted = 0

    def put(self, key: Key, value: Value) -> Sequence[Value]:
        """Add or replace an entry; return what was evicted for it."""
        self[key] = value
        self.move_to_end(key)
        return self._evict() if len(self) > self.most else ()

    def use(self, key: Key) -> Value | None:
        """Find an entry, and make it the newest; None: there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def _evict(self) -> Sequence[Value]:
        self.num_evicted += 1
        return (self.popitem(last=False)[1],)


class BoundedBytes(Bounded[Key, Weighed]):
    """A map by the size of its entries; `remove` and `clear` take entries out, and nothing else.

    size_bytes: Of all entries together. Add to it what an entry grows by, and `trim` then.
    """

    __slots__ = ("size_bytes",)

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.size_bytes = 0

    def put(self, key: Key, value: Weighed) -> Sequence[Weighed]:
        before = self.pop(key, None)
        self[key] = value
        self.size_bytes += value.size_bytes - (before.size_bytes if before is not None else 0)
        return self.trim() if self.size_bytes > self.most else ()

    def trim(self) -> Sequence[Weighed]:
        """Evict what exceeds the bound, and return it, oldest first."""
        evicted = []
        while self.size_bytes > self.most:
            _, oldest = self.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
            evicted.append(oldest)
        self.num_evicted += len(evicted)
        return evicted

    def remove(self, key: Key) -> None:
        """Remove an entry, if it is there."""
        value = self.pop(key, None)
        if value is not None:
            self.size_bytes -= value.size_bytes

    def clear(self) -> None:
        super().clear()
        self.size_bytes = 0


class Backlog(deque[Item]):
    """A queue for a reader that may be slow.

    Args:
        most: How many items wait in it.
    """

    __slots__ = ("num_dropped",)

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self.num_dropped = 0

    def offer(self, item: Item) -> bool:
        """Add an item; False: the queue is full, and the item is dropped."""
        has_room = len(self) != self.maxlen
        if has_room:
            self.append(item)
        else:
            self.num_dropped += 1
        return has_room

    def push(self, item: Item) -> None:
        """Add an item; the oldest one is dropped if the queue is full."""
        self.num_dropped += len(self) == self.maxlen
        self.append(item)

    def take(self, most: int | None = None) -> list[Item]:
        """Remove so many items at most, oldest first; None: all. Others may add some meanwhile."""
        num = len(self) if most is None else min(most, len(self))
        return [self.popleft() for _ in range(num)]


class RecentSum:
    """A sum whose terms fade with age: after `constant_s` a term counts 1/e."""

    __slots__ = ("_at_s", "_constant_s", "_sum")

    def __init__(self, constant_s: float) -> None:
        self._constant_s = constant_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, value: float, now_s: float) -> None:
        """Add a term; the ones before fade until `now_s`."""
        fade = exp(min(0.0, self._at_s - now_s) / self._constant_s)
        self._sum, self._at_s = self._sum * fade + value, now_s

    def at(self, now_s: float) -> float:
        """Return the sum as of `now_s`, never before the last `add`."""
        if self._sum == 0.0:
            return 0.0
        return self._sum * exp(min(0.0, self._at_s - now_s) / self._constant_s)


class RecentRate:
    """How often something happens, a second.

    Nothing is known from before `begun_s`, so only the time since then counts. At least `least_s`
    is assumed: one event at the start is no pace.
    """

    __slots__ = ("_begun_s", "_constant_s", "_least_s", "_sum")

    def __init__(self, constant_s: float, least_s: float, *, begun_s: float | None = None) -> None:
        self._constant_s = constant_s
        self._least_s = least_s
        self._begun_s = begun_s  # None: with the first event
        self._sum = RecentSum(constant_s)

    def add(self, now_s: float) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        self._sum.add(1.0, now_s)

    def at(self, now_s: float) -> float:
        """Return the rate as of `now_s`; 0.0 until time has passed."""
        if self._begun_s is None or now_s <= self._begun_s:
            return 0.0
        seen_s = max(self._least_s, now_s - self._begun_s)
        return self._sum.at(now_s) / (self._constant_s * (1.0 - exp(-seen_s / self._constant_s)))


class RecentShare:
    """The share of recent time that something was on, in [0, 1]; off and 0.0 at first."""

    __slots__ = ("_at_s", "_constant_s", "_is_on", "_share")

    def __init__(self, constant_s: float) -> None:
        self._constant_s = constant_s
        self._is_on = False
        self._share = 0.0
        self._at_s = 0.0

    def switch(self, is_on: bool, now_s: float) -> None:
        """Set it on or off from `now_s` on; a second time has no effect."""
        if is_on is not self._is_on:
            self._share = self.at(now_s)
            self._at_s, self._is_on = now_s, is_on

    def at(self, now_s: float) -> float:
        """Return the share as of `now_s`, never before the last switch."""
        target = 1.0 if self._is_on else 0.0
        if self._share == target:
            return target
        fade = exp(min(0.0, self._at_s - now_s) / self._constant_s)
        return target + (self._share - target) * fade
