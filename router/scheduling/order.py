"""The order of the requests in the queue. Whether a request may go is decided in `queue`.

A request that has waited for the maximum goes first. Then the order is: interactive before batch,
the highest priority, callers that have not used their share, the shortest prompt, by the time to
read and to compute it. Requests that
wait for room in a cache go behind the others, in order of arrival: so none of them starves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from policies.view import CandidateId
from router.base.caller import Caller
from router.scheduling.shares import Shares
from router.scheduling.waiting import LinePosition, QueueRules, Waiting

QUANTUM_MS: Final = 5_000.0
"""Compute after which waiting callers of weight 1 take turns."""


class LineKey(NamedTuple):
    """Requests that one refusal can stop together."""

    candidate: CandidateId | None  # None: not chosen yet
    level: int
    is_home: bool  # their conversations live there
    is_held: bool = False  # they wait for room in a cache


class Order:
    """The requests in the queue, in one sorted line for each `LineKey`."""

    __slots__ = ("_callers", "_in_time", "_keys", "_lines", "_num_changes", "_num_there",
                 "_requests", "_rules", "_shares", "_work_ms")  # fmt: skip

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._requests: dict[int, Waiting] = {}  # by number
        self._keys: dict[int, LineKey] = {}  # line of each request
        self._lines: dict[LineKey, list[LinePosition]] = {}  # none is empty
        self._in_time = {is_batch: OrderedDict[int, Waiting]() for is_batch in (False, True)}
        self._work_ms: dict[CandidateId | None, float] = {}  # of all requests for a candidate
        self._num_there: Counter[tuple[CandidateId | None, bool]] = Counter()  # by batch or not
        self._shares: dict[int, Shares] = {}  # by priority: callers of one priority take turns
        self._callers: dict[int, Counter[str | None]] = {}  # by priority: requests of each name
        self._num_changes = 0  # of the shares: the order of the lines has changed

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the requests in order of arrival."""
        return iter(self._requests.values())

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting.place.number in self._requests

    def get(self, number: int) -> Waiting | None:
        """Return a request by its number."""
        return self._requests.get(number)

    def num_there(self, candidate: CandidateId | None, *, for_batch: bool) -> int:
        """Count the requests for a candidate; without batch requests unless `for_batch`."""
        num_batch = self._num_there[candidate, True] if for_batch else 0
        return self._num_there[candidate, False] + num_batch

    def num_by_candidate(self) -> dict[CandidateId, int]:
        """Count the interactive requests for each candidate."""
        return {
            candidate: num
            for (candidate, is_batch), num in self._num_there.items()
            if num and candidate is not None and not is_batch
        }

    def work_ms(self, candidate: CandidateId | None) -> float:
        """Sum the compute of the requests for a candidate."""
        return self._work_ms.get(candidate, 0.0)

    def end_of(self, candidate: CandidateId | None) -> Waiting | None:
        """Return the last request for a candidate, without those that wait for room."""
        ends = [
            line[-1]
            for key, line in self._lines.items()
            if key.candidate == candidate and not key.is_held
        ]
        return self._requests[max(ends).number] if ends else None

    @property
    def num_batch(self) -> int:
        """Count the requests of class batch."""
        return sum(num for (_, is_batch), num in self._num_there.items() if is_batch)

    def is_spent(self, caller: Caller) -> bool:
        """Return whether a caller has used its share."""
        shares = self._shares.get(caller.priority)
        return shares is not None and shares.is_spent(caller.name)

    def last(self) -> Waiting | None:
        """Return the request to refuse first: lowest class, priority, and longest; O(n)."""
        if not self._requests:
            return None
        return max(self._requests.values(), key=lambda each: each.place[1:])

    def add(self, waiting: Waiting, number: int, *, is_home: bool) -> None:
        """Add a request that no candidate was chosen for yet."""
        caller = waiting.caller
        waiting.place = LinePosition(True, waiting.level, self.is_spent(caller), False, 0.0, number)
        self._requests[number] = waiting
        self._callers.setdefault(caller.priority, Counter())[caller.name] += 1
        self._in_time[waiting.is_batch][number] = waiting
        self._join(waiting, LineKey(None, waiting.level, is_home))

    def remove(self, waiting: Waiting) -> None:
        """Remove a request."""
        self._leave(waiting)
        del self._requests[waiting.place.number]
        self._in_time[waiting.is_batch].pop(waiting.place.number, None)
        names, name = self._callers[waiting.caller.priority], waiting.caller.name
        names[name] -= 1
        if not names[name]:
            del names[name]

    def put(
        self,
        waiting: Waiting,
        candidate: CandidateId,
        compute_ms: float,
        read_ms: float,
        *,
        is_home: bool,
    ) -> None:
        """Move a request to the line of the candidate that was chosen for it."""
        self._leave(waiting)
        is_held = waiting.held_by == "room"
        if waiting.place.is_in_time:
            waiting.place = waiting.place._replace(
                is_held=is_held, length_ms=0.0 if is_held else compute_ms + read_ms
            )
        waiting.compute_ms = compute_ms
        self._join(waiting, LineKey(candidate, waiting.level, is_home, is_held))

    def move_late(self, now_s: float) -> None:
        """Move requests that have waited for the maximum to the front."""
        for is_batch, in_time in self._in_time.items():
            longest_s = self._rules.longest_wait_s(is_batch=is_batch)
            while in_time:
                number, waiting = next(iter(in_time.items()))
                if now_s - waiting.since_s < longest_s:
                    break
                del in_time[number]
                self._replace(waiting, LinePosition(False, 0, False, False, 0.0, number))

    def charge(self, waiting: Waiting, compute_ms: float) -> None:
        """Charge a sent request to its caller's share; O(n) when a caller's state changes."""
        caller = waiting.caller
        shares = self._shares.setdefault(caller.priority, Shares(QUANTUM_MS))
        names = self._callers.get(caller.priority, Counter())
        if not shares.charge(caller.name, caller.weight, compute_ms, names):
            return
        self._num_changes += 1
        for each in self._requests.values():
            if each.caller.priority == caller.priority and each.place.is_in_time:
                is_spent = shares.is_spent(each.caller.name)
                if is_spent is not each.place.is_spent:
                    self._replace(each, each.place._replace(is_spent=is_spent))

    def walk(self, is_closed: Callable[[LineKey], bool]) -> Iterator[tuple[LineKey, Waiting]]:
        """Yield the requests of open lines in order, each at most once, with its line.

        Lines may change and close meanwhile. A request that is moved to another line was seen.
        """
        seen: set[int] = set()
        num_changes = -1
        heads: list[tuple[LinePosition, LineKey]] = []
        while True:
            if num_changes != self._num_changes:
                num_changes = self._num_changes
                heads = [(line[0], key) for key, line in self._lines.items()]
                heapify(heads)
            if not heads:
                return
            place, key = heappop(heads)
            if is_closed(key):
                continue
            waiting = self._requests.get(place.number)
            if waiting is not None and waiting.place == place and place.number not in seen:
                seen.add(place.number)
                yield key, waiting
            line = self._lines.get(key, [])
            index = bisect_right(line, place)
            if index < len(line):
                heappush(heads, (line[index], key))

    def ahead_ms(self, candidate: CandidateId, place: LinePosition) -> float:
        """Sum the work that goes to a candidate before a place does; O(n)."""
        return sum(
            self._requests[each.number].compute_ms
            for key, line in self._lines.items()
            if key.candidate == candidate
            for each in line[: bisect_left(line, place)]
        )

    def _replace(self, waiting: Waiting, place: LinePosition) -> None:
        """Move a request to another place in its line."""
        key = self._leave(waiting)
        waiting.place = place
        self._join(waiting, key)

    def _join(self, waiting: Waiting, key: LineKey) -> None:
        self._keys[waiting.place.number] = key
        insort(self._lines.setdefault(key, []), waiting.place)
        self._num_there[key.candidate, waiting.is_batch] += 1
        self._work_ms[key.candidate] = self.work_ms(key.candidate) + waiting.compute_ms

    def _leave(self, waiting: Waiting) -> LineKey:
        key = self._keys.pop(waiting.place.number)
        line = self._lines[key]
        del line[bisect_left(line, waiting.place)]
        if not line:
            del self._lines[key]
        self._num_there[key.candidate, waiting.is_batch] -= 1
        self._work_ms[key.candidate] -= waiting.compute_ms
        if not self.num_there(key.candidate, for_batch=True):
            del self._work_ms[key.candidate]  # floats drift
        return key
