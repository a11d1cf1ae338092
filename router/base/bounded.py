"""Maps and queues with a bound. What goes beyond it is counted.

    Bounded        a map of so many entries; the oldest one is evicted
    BoundedBytes   a map whose entries take so many bytes together; the oldest ones are evicted
    Backlog        a queue for a reader that may be slow; its newest or oldest item is dropped

A map or queue that evicts by another rule (by age, by several bounds) is kept beside that rule.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
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
