"""The queue: the requests that wait in the router, and when each is sent. A policy decides where.

`rules` decides whether a request may go. `order` has the order. The first request that waits
for room, here or at another router, goes before the others; one that has just come is tried once.

A request with a deadline is refused on arrival if the work ahead takes too long. Later it is
refused when the time left is too short to compute it. An idle replica takes any request, because
the prediction may be wrong.

What must not be here: a clock, tasks, how a request is placed or sent. The router and the simulator
use the same queue.

`Elsewhere` is what other routers say of their queues. A router alone shares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final, Generic, Literal, NamedTuple

from policies.view import CandidateId
from router.scheduling.conversations import Conversations
from router.scheduling.order import LineKey, Order
from router.scheduling.rules import C, Rules, Verdict, compute_ms
from router.scheduling.waiting import (
    NOTHING,
    Candidates,
    Choice,
    InFront,
    QueueRules,
    Waiting,
    Where,
    level_of,
)


class Elsewhere:
    """The queues of other routers, as this router's queue sees them."""

    def num_waiting(self, now_s: float) -> int:
        """Count the requests that wait for room at other routers."""
        return 0

    def first_s(self, now_s: float) -> float | None:
        """Return the place of the first of them, as `LinePosition.key_s`; None: none waits."""
        return None

    def waits(self, num: int, first_s: float | None, now_s: float) -> None:
        """Publish how many wait for room here, and the place of the first; often called."""

    def asked(self, session: int, *, has_room: bool) -> None:
        """Publish that a conversation's next turn has come, and waits here."""


ALONE = Elsewhere()


_NUM_TRIES: Final = 8  # requests of similar lines that are placed in vain before a release ends

_NUM_MOVES: Final = 2  # ends of lines that are placed again in vain before a release ends

Limit = Literal["deadline", "tbt"]


class Outlook(NamedTuple):
    """Predicted time to a request's first token, and by how much it keeps its deadline."""

    ttft_ms: float
    spare_ms: float  # negative: its deadline cannot be kept; infinite: it has none


Choose = Callable[[Waiting, InFront, Where], C | None]
Send = Callable[[Waiting, C, str], bool]
Refuse = Callable[[Waiting, Limit, float], None]


class Queue(Generic[C]):
    """The requests that wait in the router.

    A release takes as long as it sends requests, however many wait.

    Args:
        rules: When a request may go.
        working_sets: Conversations that live in each cache.
        candidates: State of the replicas.
        has_blocks: Whether a replica has free blocks for a request beside the requests it has.
        elsewhere: The queues of other routers.
    """

    def __init__(
        self,
        rules: QueueRules,
        conversations: Conversations,
        candidates: Candidates,
        has_blocks: Callable[[Waiting, C], bool],
        elsewhere: Elsewhere = ALONE,
    ) -> None:
        self.rules = Rules(rules, conversations, candidates, has_blocks)
        self._conversations = conversations
        self._elsewhere = elsewhere
        self._order = Order(rules)
        self._num_added = 0
        self._num_seen = 0  # of these, as of the last release
        self._latest_start: list[tuple[float, int]] = []  # heap: after it a deadline is missed

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the requests in order of arrival."""
        return iter(self._order)

    @property
    def num_batch(self) -> int:
        """Count the requests of class batch."""
        return self._order.num_batch

    def add(self, waiting: Waiting) -> None:
        """Add a request that has just come; call `expect` too if it has a deadline."""
        self._num_added += 1
        self.arrive(waiting, waiting.since_s)
        home = self._home(waiting)
        waiting.has_room = home is not None
        self._order.add(waiting, self._num_added, home)
        if waiting.session is not None:
            self._elsewhere.asked(waiting.session, has_room=waiting.has_room)

    def remove(self, waiting: Waiting, now_s: float) -> None:
        """Remove a request if it is in the queue: its client has left."""
        if self._order.get(waiting.place.number) is not None:
            self._order.remove(waiting)
            self.left(waiting, now_s)

    def left(self, waiting: Waiting, now_s: float) -> None:
        """Record that a turn that has come will not be sent."""
        if waiting.session is not None:
            self._conversations.left(waiting.session, now_s)

    def num_before(self, waiting: Waiting) -> int:
        """Count the requests that go before one in its line."""
        return self._order.num_before(waiting)

    def held_by(self, waiting: Waiting) -> str | None:
        """Return what a request waits for, as `Verdict.why`. None: for those before it."""
        return "room" if self._order.is_for_room(waiting) else waiting.held_by

    def displaced(self, *, is_batch: bool, priority: int) -> Waiting | None:
        """Return the request that a full queue refuses for one that comes.

        None: no request is of a lower class, or of its class and a lower priority. O(n).
        """
        last = self._order.last()
        if last is None or last.level <= level_of(is_batch=is_batch, priority=priority):
            return None
        return last

    def release(self, now_s: float, choose: Choose[C], send: Send[C], refuse: Refuse,
                has_time: Callable[[], bool] = lambda: True) -> bool:  # fmt: skip
        """Send all requests that may go, and refuse those whose limits cannot be kept.

        Args:
            now_s: Now.
            choose: Places a request, with the work that goes before it to each candidate; None: it
                needs no place any more.
            send: Takes a request that has left the queue, its candidate, and why it goes. Books it;
                False: that failed.
            refuse: Takes a request that has left the queue, the limit, and how late it would be, in
                milliseconds.
            has_time: Asked after each request that has left.

        Returns:
            False: there was no time to send all.
        """
        self._conversations.expire(now_s)
        self._order.move_late(now_s)
        self._refuse_late(now_s, refuse)
        full: set[CandidateId] = set()
        num_tries: Counter[LineKey] = Counter()
        num_seen, self._num_seen = self._num_seen, self._num_added

        def is_closed(line: LineKey) -> bool:
            return line.candidate in full or num_tries[line] >= _NUM_TRIES

        for line, waiting in self._order.walk(is_closed):
            if line.needs_room and self._is_behind(waiting, now_s):
                waiting.held_by = "room"
                num_tries[line] = _NUM_TRIES
                continue
            choice = choose(waiting, NOTHING, self.rules.where(waiting))
            if choice is None:
                self.remove(waiting, now_s)
                if not has_time():
                    return False
                continue
            there, verdict = choice.view.id, self.judge(waiting, choice, now_s)
            if verdict.goes and there in full:  # a request before it waits for blocks
                verdict = Verdict(False, "window")
            if not verdict.goes:
                waiting.held_by = verdict.why
            elif line.needs_room and waiting.place.number <= num_seen:
                waiting.held_by = "room"  # it was behind others
            self._put(waiting, choice, verdict)
            if verdict.goes:
                late_ms = self._late_ms(waiting, choice, now_s)
                if late_ms > 0.0 and choice.view.num_requests:
                    self.remove(waiting, now_s)
                    refuse(waiting, "deadline", late_ms)
                    continue
                self._go(waiting, choice, verdict, now_s, send)
                if not has_time():
                    return False
                num_tries.clear()
            elif verdict.why == "tbt" and self.rules.is_late(waiting, now_s):
                self.remove(waiting, now_s)
                refuse(waiting, "tbt", 0.0)
            elif verdict.why == "window" and there not in full:
                full.add(there)
            elif verdict.why == "room" and line.needs_room:
                num_tries[line] = _NUM_TRIES  # nobody passes the first
            else:
                num_tries[line] += 1
        self._spread(now_s, choose, send, full)
        return True

    def publish_waiting(self, now_s: float) -> None:
        """Publish what waits for room here."""
        num, first = self._order.num_for_room, self._order.first_for_room()
        self._elsewhere.waits(num, None if first is None else first.key_s, now_s)

    def _spread(
        self, now_s: float, choose: Choose[C], send: Send[C], full: set[CandidateId]
    ) -> None:
        """Send requests at the ends of long lines to replicas that compute them sooner.

        A policy sees the work inside replicas, not the lines in front of them. So all requests
        with one prefix would wait for the replica that has it, while others are idle. A request
        moves only to a replica that no other request waits for.
        """
        num_in_vain = 0
        for candidate in sorted(full, key=lambda each: (-self._order.work_ms(each), each)):
            while (waiting := self._order.end_of(candidate)) is not None:
                if self._home(waiting) is not None:
                    break
                in_front_ms = {each: self._order.work_ms(each) for each in full}
                in_front_ms[candidate] -= waiting.compute_ms
                if in_front_ms[candidate] <= 0.0:
                    break
                choice = choose(waiting, in_front_ms, self.rules.where(waiting))
                if choice is None:
                    self.remove(waiting, now_s)
                    continue
                verdict, there = self.judge(waiting, choice, now_s), choice.view.id
                is_free = there not in full and self._order.end_of(there) is None
                if not is_free or verdict.why != "room" or not verdict.goes:
                    num_in_vain += 1
                    break
                if self._late_ms(waiting, choice, now_s) > 0.0:
                    break
                self._go(waiting, choice, verdict, now_s, send)
            if num_in_vain >= _NUM_MOVES:
                return

    def _go(
        self, waiting: Waiting, choice: C, verdict: Verdict, now_s: float, send: Send[C]
    ) -> None:
        """Remove a request from the queue and send it."""
        self._order.remove(waiting)
        if send(waiting, choice, verdict.why):
            self.sent(waiting, choice)

    def sent(self, waiting: Waiting, choice: C) -> None:
        """Charge a request that was sent to its caller's share."""
        self._order.charge(waiting, compute_ms(choice, waiting.num_tokens))

    def judge(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        """Return whether a request may go to a candidate now; it need not be in the queue."""
        num_others = self._order.num_for_room - self._order.is_for_room(waiting)
        num_others += self._elsewhere.num_waiting(now_s)
        return self.rules.judge(waiting, choice, now_s, num_others)

    def _is_behind(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether another router has a request for room that comes first."""
        first_s = self._elsewhere.first_s(now_s)
        is_first = first_s is None or waiting.place.key_s <= first_s
        return not is_first and not self.rules.is_late(waiting, now_s)

    # Deadlines

    def expect(self, waiting: Waiting, choice: C, now_s: float) -> Outlook:
        """Predict whether a request in the queue keeps its deadline; if not, it is to be refused.

        An idle replica that may take it takes it, whatever is predicted.
        """
        self._put(waiting, choice)
        outlook = self.outlook(waiting, choice, now_s)
        if not choice.view.num_requests and self.judge(waiting, choice, now_s).goes:
            return outlook._replace(spare_ms=inf)
        if waiting.deadline_s is not None:
            latest_s = waiting.deadline_s - 1e-3 * waiting.compute_ms
            heappush(self._latest_start, (latest_s, waiting.place.number))
            if len(self._latest_start) > 2 * len(self) + 1_000:  # most of these have left
                left = [each for each in self._latest_start if self._order.get(each[1])]
                self._latest_start = sorted(left)  # a sorted list is a heap
        return outlook

    def outlook(self, waiting: Waiting, choice: C, now_s: float) -> Outlook:
        """Predict a request's first token behind all requests that go before it there. O(n)."""
        place = waiting.place
        if not place.number:  # not in the queue
            waiting.compute_ms = compute_ms(choice, waiting.num_tokens)
            place = self._order.position(waiting, self._num_added + 1)
        ttft_ms = self._order.ahead_ms(choice.view.id, place) + _ttft_ms(choice)
        if waiting.deadline_s is None:
            return Outlook(ttft_ms, inf)
        return Outlook(ttft_ms, 1e3 * (waiting.deadline_s - now_s) - ttft_ms)

    def _refuse_late(self, now_s: float, refuse: Refuse) -> None:
        """Refuse requests whose time left is too short to compute them."""
        while self._latest_start and self._latest_start[0][0] < now_s:
            latest_s, number = heappop(self._latest_start)
            waiting = self._order.get(number)
            if waiting is not None:
                self.remove(waiting, now_s)
                refuse(waiting, "deadline", 1e3 * (now_s - latest_s))

    @staticmethod
    def _late_ms(waiting: Waiting, choice: C, now_s: float) -> float:
        """Return by how much a request misses its deadline if it is sent now; 0.0: not at all."""
        if waiting.deadline_s is None:
            return 0.0
        return max(0.0, 1e3 * (now_s - waiting.deadline_s) + _ttft_ms(choice))

    # Bookkeeping

    def _put(self, waiting: Waiting, choice: C, verdict: Verdict | None = None) -> None:
        """Move a request to the line of the candidate that was chosen, or of those for room."""
        own_ms = compute_ms(choice, waiting.num_tokens)
        waits_for_room = verdict is not None and verdict == Verdict(False, "room")
        if waits_for_room and self._home(waiting) is not None and waiting.session is not None:
            self._conversations.leave(waiting.session)
            self._elsewhere.asked(waiting.session, has_room=False)
        waiting.has_room = self._home(waiting) is not None
        self._order.put(waiting, None if waits_for_room else choice.view.id, own_ms)

    def arrive(self, waiting: Waiting, now_s: float) -> None:
        """Record that a turn has come, which may not have to wait: its pause is over."""
        waiting.ticket_s = now_s
        if waiting.session is not None:
            waiting.ticket_s = self._conversations.asked(waiting.session, now_s, waiting.parent)
            waiting.is_seldom = not waiting.is_batch and self._conversations.comes_seldom(
                waiting.session
            )

    def _home(self, waiting: Waiting) -> CandidateId | None:
        """Return where a request's conversation has room; None: nowhere."""
        return None if waiting.session is None else self._conversations.bound_to(waiting.session)


def _ttft_ms(choice: Choice) -> float:
    """Return the predicted time to a first token at the chosen candidate."""
    return next(cost.ttft_ms for cost in choice.costs() if cost.id == choice.view.id)
