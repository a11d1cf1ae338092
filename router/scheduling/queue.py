"""Requests that wait in the router, and which of them may go.

A request goes to the candidate that its policy chooses, by the caches and queues of the moment it
leaves, as soon as two things hold there:

1. **The window is open.** Requests inside an engine cannot be put in another order, and what they
   count on is evicted while they wait. So an engine has one ready beside the one it computes.
2. **It fits.** The conversations that live there, this one included, take no more than `fill` of
   the cache; of those that have outgrown it the last that came waits. Or the engine has been idle
   for as long as this prompt takes it: where compute is to spare, recomputing costs less than
   waiting. (Buying when the rent paid is the price: never more than twice the best that could have
   been done.)

First go interactive requests, then those whose conversation lives where they want to go, then by
how long they have waited over how long they take (uncached tokens, by the learned cost), so that
short ones do not wait for long ones, and long ones not for ever. One that has waited for
`max_wait_s` goes first and needs no room, and one of class batch after `batch_max_wait_s`.

What must live here: that rule. What must not: a clock, tasks, how a request is placed or sent. The
router and the simulator use the same queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from math import log2
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from policies.view import CandidateId, ReplicaView
from router.replicas.working_sets import WorkingSets

_NUM_TRIES: Final = 8  # requests in a row that are placed in vain before a release is over
_NUM_GONE: Final = 64  # likewise requests that cannot be placed
_SHORT: Final = 64  # requests; the order of so many is exact, of more it is that of their groups
_STEPS: Final = 2  # of groups in a factor of 2
_number = attrgetter("number")


Group = tuple[CandidateId | None, bool, bool, int]
"""Those that want to go to one candidate, are batch or not, live there or not, and take about as
long."""


class QueueRules(Struct, frozen=True, kw_only=True):
    """When a request may go; see the module."""

    window: int = 1  # requests that may wait at a candidate behind the one it computes
    fill: float = 0.9  # of a cache, for the conversations that live there
    patience: float = 1.0  # idle time that does instead of room, in times the prompt would take
    max_wait_s: float = 60.0
    batch_max_wait_s: float = 600.0


class Choice(Protocol):
    """Where a policy would send a request now."""

    @property
    def view(self) -> ReplicaView: ...


class Waiting(Struct):
    """One request that waits; `item` is the caller's."""

    item: Any
    session: int | None
    num_tokens: int
    since_s: float
    is_batch: bool = False
    number: int = 0  # in the order of arrival
    compute_ms: float = 1.0  # as last chosen
    candidate: CandidateId | None = None  # likewise
    group: Group = (None, False, True, 0)


class Verdict(NamedTuple):
    """Whether a request may go, and why.

    `why` it goes: room, idle (compute to spare), waited_out; what it waits for: window, room.
    """

    goes: bool
    why: str


C = TypeVar("C", bound=Choice)


class Queue(Generic[C]):
    """The requests that wait.

    Those of a group (candidate, class, lives there, time it takes) are in the order of their
    arrival. In a long queue a release compares the first of each group alone: what that takes
    depends on who goes, not on how many wait.

    Args:
        rules: When one may go.
        working_sets: What lives where.
        idle_s: For how long a candidate has computed no prompt; 0.0: it does.
        capacity: A candidate's cache in tokens; None: not known, and everything fits.
    """

    __slots__ = ("_capacity", "_groups", "_idle_s", "_max_wait_s", "_num_added", "_num_batch",
                 "_rules", "_waiting", "_working_sets")  # fmt: skip

    def __init__(
        self,
        rules: QueueRules,
        working_sets: WorkingSets,
        *,
        idle_s: Callable[[CandidateId, float], float],
        capacity: Callable[[CandidateId], int | None],
    ) -> None:
        self._rules = rules
        self._max_wait_s = (rules.max_wait_s, rules.batch_max_wait_s)
        self._working_sets = working_sets
        self._idle_s = idle_s
        self._capacity = capacity
        self._waiting: set[int] = set()  # numbers
        self._groups: dict[Group, list[Waiting]] = {}  # none empty, each by number
        self._num_added = self._num_batch = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_batch(self) -> int:
        """Count those of class batch."""
        return self._num_batch

    def add(
        self,
        item: Any,
        session: int | None,
        num_tokens: int,
        now_s: float,
        *,
        is_batch: bool = False,
    ) -> Waiting:
        """Let a request wait."""
        self._num_added += 1
        waiting = Waiting(
            item=item,
            session=session,
            num_tokens=num_tokens,
            since_s=now_s,
            is_batch=is_batch,
            number=self._num_added,
            group=(None, is_batch, True, 0),
        )
        self._num_batch += is_batch
        self._waiting.add(waiting.number)
        self._groups.setdefault(waiting.group, []).append(waiting)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        """Forget a request: it is sent, or its client has left. Once more has no effect."""
        if waiting.number in self._waiting:
            self._waiting.discard(waiting.number)
            self._num_batch -= waiting.is_batch
            self._leave_group(waiting)

    def costliest_batch(self) -> Waiting | None:
        """Return the batch request that is to be refused first; None: none waits.

        Of those that take the longest (uncached tokens), to a factor of 1.4, the last that came;
        first those that live nowhere. O(groups).
        """
        if not self._num_batch:
            return None
        name = max([name for name in self._groups if name[1]], key=_price)
        return self._groups[name][-1]

    def release(
        self,
        now_s: float,
        choose: Callable[[Waiting], C | None],
        send: Callable[[Waiting, C, str], None],
    ) -> None:
        """Send all that may go.

        Args:
            now_s: Now.
            choose: Places a request by what is known now; None: it is of no concern any more.
            send: Takes a request, the candidate chosen and why it may go, and books it; it has left
                the queue then.
        """
        self._working_sets.expire(now_s)
        full: set[CandidateId | None] = set()
        seen: set[int] = set()
        for behind in (False, True):
            if behind and not self._num_batch:
                break
            num_tries = num_gone = 0  # those who wait for room stop their own class alone
            for waiting in self._ordered(now_s, full, behind=behind):
                if waiting.number in seen:
                    continue  # it was put into another group
                seen.add(waiting.number)
                choice = choose(waiting)
                if choice is None:
                    self.remove(waiting)
                    num_gone += 1
                    if num_gone >= _NUM_GONE:
                        break
                    continue
                view = choice.view
                self._put(waiting, view)
                verdict = self.judge(waiting, view, now_s)
                if verdict.goes:
                    self.remove(waiting)
                    send(waiting, choice, verdict.why)
                    num_tries = 0
                    continue
                if verdict.why == "window" and view.id not in full:
                    full.add(view.id)
                    continue
                num_tries += 1
                if num_tries >= _NUM_TRIES:
                    break

    def judge(self, waiting: Waiting, view: ReplicaView, now_s: float) -> Verdict:
        """Return whether a request may go to a candidate now; it need not be in the queue."""
        if view.num_waiting > self._rules.window:
            return Verdict(False, "window")
        capacity = self._capacity(view.id)
        session, working_sets = waiting.session, self._working_sets
        if capacity is None or session is None:
            return Verdict(True, "room")
        room = self._rules.fill * capacity
        num_own = working_sets.num_own_tokens(session, waiting.num_tokens, view.num_gpu_tokens)
        there = working_sets.at(view.id)
        if working_sets.home(session) != view.id:
            num_before = there.num_tokens
        elif there.num_tokens <= room:
            return Verdict(True, "room")
        else:
            num_before = working_sets.num_tokens_before(session)
        if not num_before or num_before + num_own <= room:
            return Verdict(True, "room")
        if now_s - waiting.since_s >= self._max_wait_s[waiting.is_batch]:
            return Verdict(True, "waited_out")
        idle_s = self._idle_s(view.id, now_s)
        compute_ms = _compute_ms(view, waiting.num_tokens)
        if 1e3 * idle_s >= self._rules.patience * compute_ms:
            return Verdict(True, "idle")
        return Verdict(False, "room")

    def _ordered(
        self, now_s: float, full: set[CandidateId | None], *, behind: bool
    ) -> Iterator[Waiting]:
        """List who waits, first who is to go first, but those for candidates that are `full`.

        `behind`: batch requests that have not waited for long enough to go first; else all others.
        The queue and `full` may change meanwhile.
        """
        max_wait_s, home = self._max_wait_s, self._working_sets.home

        def key(each: Waiting) -> tuple[int, bool, float, int]:
            waited_s = now_s - each.since_s
            is_batch = each.is_batch
            is_in_time = waited_s < max_wait_s[is_batch]
            lives_there = each.session is not None and home(each.session) == each.candidate
            rank = is_in_time * (1 + is_batch)
            return rank, not lives_there, -waited_s / each.compute_ms, each.number

        heaps: dict[CandidateId | None, list[tuple[Any, Waiting, Group]]] = {}
        is_short = len(self._waiting) <= _SHORT
        late_s = now_s - max_wait_s[True]
        for name, group in self._groups.items():
            candidate, is_batch = name[:2]
            if candidate in full or (behind and not is_batch):
                continue
            if is_batch and not behind and group[0].since_s > late_s:
                continue
            first = group if is_short else group[:1]
            heaps.setdefault(candidate, []).extend([(key(each), each, name) for each in first])
        for heap in heaps.values():
            heapify(heap)
        while heaps:
            candidate = min(heaps, key=lambda each: heaps[each][0][0])
            if candidate in full:
                del heaps[candidate]
                continue
            heap = heaps[candidate]
            place, waiting, name = heap[0]
            if place[0] > 1 and not behind:
                return  # nobody is left who is not behind
            if waiting.number in self._waiting and waiting.group == name:
                yield waiting
            others = () if is_short else self._groups.get(name, ())
            index = bisect_right(others, waiting.number, key=_number)
            if index < len(others):
                heapreplace(heap, (key(others[index]), others[index], name))
            else:
                heappop(heap)
                if not heap:
                    del heaps[candidate]

    def _put(self, waiting: Waiting, view: ReplicaView) -> None:
        """Note where a request would go now, and how long it would take there."""
        session = waiting.session
        home = self._working_sets.home(session) if session is not None else None
        waiting.candidate = view.id
        waiting.compute_ms = _compute_ms(view, waiting.num_tokens)
        steps = int(_STEPS * log2(waiting.compute_ms))
        name = (view.id, waiting.is_batch, home == view.id, steps)
        if name != waiting.group:
            self._leave_group(waiting)
            waiting.group = name
            group = self._groups.setdefault(name, [])
            group.insert(bisect_left(group, waiting.number, key=_number), waiting)

    def _leave_group(self, waiting: Waiting) -> None:
        group = self._groups[waiting.group]
        del group[bisect_left(group, waiting.number, key=_number)]
        if not group:
            del self._groups[waiting.group]


def _price(name: Group) -> tuple[int, bool]:
    """Order groups by what their requests take, and then by whether they live nowhere."""
    return name[3], not name[2]


def _compute_ms(view: ReplicaView, num_tokens: int) -> float:
    """Predict how long a prompt keeps an engine; at least 1 ms."""
    num_held = max(view.num_gpu_tokens, view.num_cpu_tokens)
    cost = view.cost
    return max(1.0, cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms)
