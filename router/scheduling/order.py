"""The order of the requests in the queue. Whether a request may go is decided in `queue`.

A request that has waited for the maximum goes first. Then the order is: interactive before batch,
the highest priority, callers that have not used their share, the shortest prompt, by the time to
read and to compute it. Requests that wait for room in a cache go by their conversation's ticket,
those that come for a single turn by their arrival. A second of compute counts as 100 s of waiting
there, up to 300 s, so that none of them starves.

interactive   a person waits for the answer; the default
batch         goes when no interactive request can, and is refused first

Callers share the compute of the replicas by weight while several of them wait. Each caller may use
its weight times the quantum in a round. Each sent request takes the compute of its prompt from
that. Cached tokens are free, so caches keep their value. A caller that has used its share goes
behind the others. When every waiting caller has used its share, the next round begins. A caller
that used too much gets less of it. A caller that does not wait saves nothing.

Source: deficit longest prefix match (DLPM, arXiv 2501.14312), in time instead of tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple, get_args

from policies.view import CandidateId
from router.base.errors import BadRequest
from router.scheduling.waiting import LATE, LinePosition, QueueRules, Waiting

ServiceClass = Literal["interactive", "batch"]

CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)
INTERACTIVE: Final[ServiceClass] = "interactive"
BATCH: Final[ServiceClass] = "batch"


CLASS_HEADER: Final = "x-warmroute-class"
DEADLINE_HEADER: Final = "x-warmroute-deadline-ms"
MAX_DEADLINE_MS: Final = 3_600_000

KEEPALIVE_HEADER: Final = "x-warmroute-keepalive-s"
MAX_KEEPALIVE_S: Final = 600

_NUMBER: Final = re.compile(r"[0-9]{1,7}")


def class_of(headers: Mapping[str, str], *, is_batch: bool) -> ServiceClass:
    """Return the class of a request; `is_batch`: all that its caller sends is batch.

    Raises:
        BadRequest: the header names none.
    """
    given = headers.get(CLASS_HEADER)
    if given is not None and given not in CLASSES:
        raise BadRequest(
            f"`{CLASS_HEADER}` must be one of {', '.join(CLASSES)}", param=CLASS_HEADER
        )
    return BATCH if is_batch or given == BATCH else INTERACTIVE


def deadline_ms_of(headers: Mapping[str, str]) -> float | None:
    """Return within what time of its arrival a request wants its first token; None: no header.

    Raises:
        BadRequest: the header is no number in its range.
    """
    return _number(headers, DEADLINE_HEADER, MAX_DEADLINE_MS)


def keepalive_s_of(headers: Mapping[str, str]) -> float | None:
    """Return how often a stream's client wants a comment before the first token; None: never.

    Raises:
        BadRequest: the header is no number in its range.
    """
    return _number(headers, KEEPALIVE_HEADER, MAX_KEEPALIVE_S)


def _number(headers: Mapping[str, str], name: str, most: int) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= most:
        raise BadRequest(f"`{name}` must be a whole number from 1 to {most}", param=name)
    return float(given)


class Shares:
    """Compute that each caller has left of a round.

    Args:
        quantum_ms: Compute of one round for a weight of 1.
    """

    __slots__ = ("_left_ms", "_quantum_ms", "_weights")

    def __init__(self, quantum_ms: float) -> None:
        self._quantum_ms = quantum_ms
        self._left_ms: dict[str | None, float] = {}  # only callers that used a part of their share
        self._weights: dict[str | None, float] = {}  # of the same callers

    def is_spent(self, caller: str | None) -> bool:
        """Return whether a caller has used its share of this round."""
        return self._left_ms.get(caller, 1.0) <= 0.0

    def charge(
        self, caller: str | None, weight: float, compute_ms: float, waiting: Collection[str | None]
    ) -> bool:
        """Charge a sent request to a caller's share; return whether any caller's state changed.

        Args:
            waiting: The callers that have requests in the queue.
        """
        spent_before = self._spent()
        share_ms = weight * self._quantum_ms
        self._weights[caller] = weight
        self._left_ms[caller] = self._left_ms.get(caller, share_ms) - compute_ms
        if waiting and all(map(self.is_spent, waiting)):
            self._begin_round(waiting)
        return self._spent() != spent_before

    def _spent(self) -> set[str | None]:
        return {caller for caller, left_ms in self._left_ms.items() if left_ms <= 0.0}

    def _begin_round(self, waiting: Collection[str | None]) -> None:
        """Begin as many rounds as it takes until one of the waiting callers has a share left."""
        num_rounds = min(
            -self._left_ms[caller] // (self._weights[caller] * self._quantum_ms) + 1.0
            for caller in waiting
        )
        for caller, left_ms in list(self._left_ms.items()):
            share_ms = self._weights[caller] * self._quantum_ms
            if left_ms + num_rounds * share_ms >= share_ms:
                del self._left_ms[caller], self._weights[caller]
            else:
                self._left_ms[caller] = left_ms + num_rounds * share_ms


QUANTUM_MS: Final = 5_000.0
"""Compute after which waiting callers of weight 1 take turns."""


SLACK: Final = 2.0  # at a candidate, a prompt goes before those that are this much longer
ROOM_SLACK: Final = 100.0  # the same of those that wait for room
MAX_ROOM_SLACK_S: Final = 300.0


class LineKey(NamedTuple):
    """Requests that one refusal can stop together: those for a candidate, or those for room."""

    candidate: CandidateId | None  # None: they wait for room, or were not placed yet
    group: str | None = None  # these can go to the same replicas
    needs_room: bool = False
    is_seldom: bool = False  # they wait for blocks, not for room, and each is tried


class Order:
    """The requests in the queue, in one sorted line for each `LineKey`."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._requests: dict[int, Waiting] = {}  # by number
        self._keys: dict[int, LineKey] = {}  # line of each request
        self._lines: dict[LineKey, list[LinePosition]] = {}  # none is empty
        self._in_time = {is_batch: OrderedDict[int, Waiting]() for is_batch in (False, True)}
        self._work_ms: dict[LineKey, float] = {}  # of all requests in a line
        # By priority: callers of one priority take turns, and how many requests each name has.
        self._shares = defaultdict[int, Shares](lambda: Shares(QUANTUM_MS))
        self._callers = defaultdict[int, Counter[str | None]](Counter)
        self._num_changes = 0  # of the shares: the order of the lines has changed

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the requests in order of arrival."""
        return iter(self._requests.values())

    def get(self, number: int) -> Waiting | None:
        """Return a request by its number."""
        return self._requests.get(number)

    @property
    def num_for_room(self) -> int:
        """Count the requests that wait for room."""
        return sum([len(line) for key, line in self._lines.items() if key.needs_room])

    def is_for_room(self, waiting: Waiting) -> bool:
        """Return whether a request waits for room."""
        key = self._keys.get(waiting.place.number)
        return key is not None and key.needs_room

    def num_before(self, waiting: Waiting) -> int:
        """Count the requests that go before one in its line."""
        key = self._keys.get(waiting.place.number)
        return 0 if key is None else bisect_left(self._lines[key], waiting.place)

    def first_for_room(self) -> LinePosition | None:
        """Return the position of the first interactive request that waits for room."""
        heads = [line[0] for key, line in self._lines.items() if key.needs_room]
        return min(heads, default=None)

    def work_ms(self, candidate: CandidateId) -> float:
        """Sum the compute of the requests for a candidate; 0.0: there are none."""
        return self._work_ms.get(LineKey(candidate), 0.0)

    def end_of(self, candidate: CandidateId) -> Waiting | None:
        """Return the last request for a candidate."""
        line = self._lines.get(LineKey(candidate))
        return self._requests[line[-1].number] if line else None

    @property
    def num_batch(self) -> int:
        """Count the requests of class batch; O(n)."""
        return sum([waiting.is_batch for waiting in self])

    def last(self) -> Waiting | None:
        """Return the request to refuse first: of the lowest class and priority, and the last."""
        ends = [line[-1] for line in self._lines.values()]
        return self._requests[max(ends, key=lambda each: each[1:]).number] if ends else None

    def add(self, waiting: Waiting, number: int, candidate: CandidateId | None) -> None:
        """Add a request for a candidate; None: it has no room."""
        waiting.place = LinePosition(True, 0, False, 0.0, number)
        self._requests[number] = waiting
        self._callers[waiting.caller.priority][waiting.caller.name] += 1
        self._in_time[waiting.is_batch][number] = waiting
        self._join(waiting, _key_of(waiting, candidate))

    def remove(self, waiting: Waiting) -> None:
        """Remove a request."""
        self._leave(waiting)
        del self._requests[waiting.place.number]
        self._in_time[waiting.is_batch].pop(waiting.place.number, None)
        self._callers[waiting.caller.priority][waiting.caller.name] -= 1

    def put(self, waiting: Waiting, candidate: CandidateId | None, compute_ms: float) -> None:
        """Move a request to the line of the candidate that was chosen; None: it has no room."""
        self._leave(waiting)
        waiting.compute_ms = compute_ms
        self._join(waiting, _key_of(waiting, candidate))

    def move_late(self, now_s: float) -> None:
        """Move requests that have waited for the maximum to the front."""
        for is_batch, in_time in self._in_time.items():
            longest_s = self._rules.longest_wait_s(is_batch=is_batch)
            while in_time:
                number, waiting = next(iter(in_time.items()))
                if now_s - waiting.since_s < LATE * longest_s:
                    break
                del in_time[number]
                self._replace(waiting, LinePosition(False, 0, False, waiting.since_s, number))

    def charge(self, waiting: Waiting, compute_ms: float) -> None:
        """Charge a sent request to its caller's share; O(n) when a caller's state changes."""
        caller = waiting.caller
        shares, names = self._shares[caller.priority], +self._callers[caller.priority]
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
        line = self._lines.get(LineKey(candidate), [])
        before = line[: bisect_left(line, place)]
        return sum([self._requests[each.number].compute_ms for each in before])

    def _replace(self, waiting: Waiting, place: LinePosition) -> None:
        """Move a request to another place in its line."""
        key = self._leave(waiting)
        waiting.place = place
        self._join(waiting, key)

    def position(self, waiting: Waiting, number: int) -> LinePosition:
        """Return where a request belongs that has not waited for the maximum."""
        compute_s = 1e-3 * waiting.compute_ms
        if waiting.has_room:
            key_s = waiting.since_s + SLACK * compute_s
        else:
            came_s = waiting.since_s if waiting.is_seldom else waiting.ticket_s
            key_s = came_s + min(ROOM_SLACK * compute_s, MAX_ROOM_SLACK_S)
        is_spent = self._shares[waiting.caller.priority].is_spent(waiting.caller.name)
        return LinePosition(True, waiting.level, is_spent, key_s, number)

    def _join(self, waiting: Waiting, key: LineKey) -> None:
        place = waiting.place
        if place.is_in_time:
            place = waiting.place = self.position(waiting, place.number)
        self._keys[place.number] = key
        insort(self._lines.setdefault(key, []), place)
        self._work_ms[key] = self._work_ms.get(key, 0.0) + waiting.compute_ms

    def _leave(self, waiting: Waiting) -> LineKey:
        key = self._keys.pop(waiting.place.number)
        line = self._lines[key]
        del line[bisect_left(line, waiting.place)]
        self._work_ms[key] -= waiting.compute_ms
        if not line:
            del self._lines[key], self._work_ms[key]  # floats drift
        return key


def _key_of(waiting: Waiting, candidate: CandidateId | None) -> LineKey:
    """Return the line of a request for a candidate; None: it has none, or has to wait for room."""
    if candidate is not None:
        return LineKey(candidate)
    if waiting.is_seldom:
        return LineKey(None, waiting.group, is_seldom=True)
    return LineKey(None, waiting.group, needs_room=waiting.session is not None)
