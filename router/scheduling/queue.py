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

First go those whose conversation lives where they want to go, then by how long they have waited
over how long they take (uncached tokens, by the learned cost), so that short ones do not wait for
long ones, and long ones not for ever. One that has waited for `max_wait_s` needs no room.

What must live here: that rule. What must not: a clock, tasks, how a request is placed or sent. The
router and the simulator use the same queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from policies.view import CandidateId, ReplicaView
from router.replicas.working_sets import WorkingSets

_NUM_TRIES: Final = 8  # requests in a row that are placed in vain before a release is over
_ORDER_S: Final = 0.05  # how old the order of a long queue may be
_SHORT: Final = 64  # requests; a queue of so many is put in order every time


class QueueRules(Struct, frozen=True, kw_only=True):
    """When a request may go; see the module."""

    window: int = 1  # requests that may wait at a candidate behind the one it computes
    fill: float = 0.9  # of a cache, for the conversations that live there
    patience: float = 1.0  # idle time that does instead of room, in times the prompt would take
    max_wait_s: float = 60.0


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
    compute_ms: float = 1.0  # as last chosen
    candidate: CandidateId | None = None  # likewise


C = TypeVar("C", bound=Choice)


class Queue(Generic[C]):
    """The requests that wait.

    Args:
        rules: When one may go.
        working_sets: What lives where.
        idle_s: For how long a candidate has computed no prompt; 0.0: it does.
        capacity: A candidate's cache in tokens; None: not known, and everything fits.
    """

    __slots__ = ("_capacity", "_idle_s", "_order", "_order_s", "_rules", "_waiting",
                 "_working_sets")  # fmt: skip

    def __init__(
        self,
        rules: QueueRules,
        working_sets: WorkingSets,
        *,
        idle_s: Callable[[CandidateId, float], float],
        capacity: Callable[[CandidateId], int | None],
    ) -> None:
        self._rules = rules
        self._working_sets = working_sets
        self._idle_s = idle_s
        self._capacity = capacity
        self._waiting: dict[int, Waiting] = {}  # by identity, oldest first
        self._order: list[Waiting] = []
        self._order_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Any, session: int | None, num_tokens: int, now_s: float) -> Waiting:
        """Let a request wait."""
        waiting = Waiting(item=item, session=session, num_tokens=num_tokens, since_s=now_s)
        self._waiting[id(waiting)] = waiting
        self._order.append(waiting)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        """Forget a request: it is sent, or its client has left. Once more has no effect."""
        self._waiting.pop(id(waiting), None)

    def release(
        self,
        now_s: float,
        choose: Callable[[Waiting], C | None],
        send: Callable[[Waiting, C], None],
    ) -> None:
        """Send all that may go.

        Args:
            now_s: Now.
            choose: Places a request by what is known now; None: it is of no concern any more.
            send: Books a request at the candidate chosen; it has left the queue then.
        """
        self._working_sets.expire(now_s)
        while self._release_one(now_s, choose, send):
            pass

    def _release_one(
        self,
        now_s: float,
        choose: Callable[[Waiting], C | None],
        send: Callable[[Waiting, C], None],
    ) -> bool:
        num_tries = 0
        full: set[CandidateId] = set()
        for waiting in self._ordered(now_s):
            if waiting.candidate in full:
                continue
            choice = choose(waiting)
            if choice is None:
                self.remove(waiting)
                continue
            view = choice.view
            waiting.candidate = view.id
            waiting.compute_ms = max(1.0, _compute_ms(view, waiting.num_tokens))
            if view.num_waiting > self._rules.window:
                full.add(view.id)
                continue
            if self._fits(waiting, view, now_s):
                self.remove(waiting)
                send(waiting, choice)
                return True
            num_tries += 1
            if num_tries >= _NUM_TRIES:
                break
        return False

    def _fits(self, waiting: Waiting, view: ReplicaView, now_s: float) -> bool:
        if now_s - waiting.since_s >= self._rules.max_wait_s:
            return True
        capacity = self._capacity(view.id)
        session, working_sets = waiting.session, self._working_sets
        if capacity is None or session is None:
            return True
        room = self._rules.fill * capacity
        num_own = working_sets.num_own_tokens(session, waiting.num_tokens, view.num_gpu_tokens)
        there = working_sets.at(view.id)
        if working_sets.home(session) == view.id:
            if there.num_tokens <= room:
                return True
            num_before = working_sets.num_tokens_before(session)
        else:
            num_before = there.num_tokens
        if not num_before or num_before + num_own <= room:
            return True
        idle_s = self._idle_s(view.id, now_s)
        return 1e3 * idle_s >= self._rules.patience * waiting.compute_ms

    def _ordered(self, now_s: float) -> Iterator[Waiting]:
        """List who waits, first who is to go first.

        The order of a long queue is kept for a moment; who came since then is at its end.
        """
        waiting, home = self._waiting, self._working_sets.home
        if len(waiting) <= _SHORT or now_s >= self._order_s + _ORDER_S:
            max_wait_s = self._rules.max_wait_s

            def key(each: Waiting) -> tuple[bool, bool, float]:
                waited_s = now_s - each.since_s
                lives = each.session is not None and home(each.session) == each.candidate
                return waited_s < max_wait_s, not lives, -waited_s / each.compute_ms

            self._order = sorted(waiting.values(), key=key)
            self._order_s = now_s
        return (each for each in self._order if id(each) in waiting)


def _compute_ms(view: ReplicaView, num_tokens: int) -> float:
    num_held = max(view.num_gpu_tokens, view.num_cpu_tokens)
    cost = view.cost
    return cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms
