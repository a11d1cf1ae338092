"""The queue: when a request is sent. Its policy decides where.

A request goes to the replica that its policy chooses at that moment, as soon as:

1. **The window is open.** A replica has one request ready beside the one that it computes, or
   `ready_ms` of short ones, which it computes in one step. The order inside an engine cannot be
   changed, and waiting there evicts the prefix that a request counts on. For the same reason a
   request waits here if the engine has no free blocks for it, unless the engine is about to idle.
2. **Its answer is fast enough**, if there is a limit on inter-token latency.
3. **It fits.** The conversations that live in the cache take at most `fill` of it, this one
   included. A CPU tier or a pool behind the cache is room, too, while reading from it takes less
   time than conversations have (`Load.room_tokens`). If they have outgrown it all, the last that
   came waits. A batch conversation takes no room from interactive ones. A prompt that does not fit
   goes when the replica has been idle for the price of the prompt (`_idle_price_ms`), or when it
   has waited for the maximum.

`router.scheduling.order` has the order. A request with a deadline is refused on arrival if the work
ahead takes too long. Later it is refused when the time left is too short to compute it. An idle
replica takes any request, because the prediction may be wrong.

What must not be here: a clock, tasks, how a request is placed or sent. The router and the simulator
use the same queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from policies.view import CandidateCost, CandidateId
from router.replicas.conversations import Conversations
from router.replicas.elsewhere import ALONE, Elsewhere
from router.replicas.ledger import NOTHING, InFront
from router.scheduling.order import LineKey, Order
from router.scheduling.waiting import Candidates, Choice, QueueRules, Waiting, level_of

PACE_SHARE: Final = 0.5
"""Part of the work at a replica's own pace that is certain: it computes short prompts together."""

IDLE_SOON_MS: Final = 60.0
"""Work below which a replica gets a request that it has no free blocks for. It would be idle before
the router learns that blocks are free."""

PATIENCE: Final = 0.5
"""Factor on the idle time after which a prompt that does not fit goes."""

_NUM_TRIES: Final = 8  # requests of similar lines that are placed in vain before a release ends

_NUM_MOVES: Final = 2  # ends of lines that are placed again in vain before a release ends

Limit = Literal["deadline", "tbt"]


class Verdict(NamedTuple):
    """Whether a request may go, and why.

    It goes because of: room, idle, waited_out. It waits for: window, tbt, room. `price_ms` is the
    idle time that it takes.
    """

    goes: bool
    why: str
    price_ms: float = 0.0


class Outlook(NamedTuple):
    """Predicted time to a request's first token, and by how much it keeps its deadline."""

    ttft_ms: float
    spare_ms: float  # negative: its deadline cannot be kept; infinite: it has none


C = TypeVar("C", bound=Choice)
Choose = Callable[[Waiting, InFront], C | None]
Send = Callable[[Waiting, C, str], None]
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

    __slots__ = ("_candidates", "_elsewhere", "_has_blocks", "_latest_start", "_num_added",
                 "_order", "_rules", "_working_sets")  # fmt: skip

    def __init__(
        self,
        rules: QueueRules,
        working_sets: Conversations,
        candidates: Candidates,
        has_blocks: Callable[[Waiting, C], bool],
        elsewhere: Elsewhere = ALONE,
    ) -> None:
        self._rules = rules
        self._working_sets = working_sets
        self._candidates = candidates
        self._has_blocks = has_blocks
        self._elsewhere = elsewhere
        self._order = Order(rules)
        self._num_added = 0
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
        self._note_turn(waiting, waiting.since_s)
        self._order.add(waiting, self._num_added, is_home=self._is_home(waiting, None))
        if waiting.session is not None:
            self._elsewhere.asked(waiting.session)

    def remove(self, waiting: Waiting) -> None:
        """Remove a request if it is in the queue: its client has left."""
        if waiting in self._order:
            self._order.remove(waiting)

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
            send: Takes a request that has left the queue, its candidate, and why it goes. Books it.
            refuse: Takes a request that has left the queue, the limit, and how late it would be, in
                milliseconds.
            has_time: Asked after each request that has left.

        Returns:
            False: there was no time to send all.
        """
        self._working_sets.expire(now_s)
        self._order.move_late(now_s)
        self._refuse_late(now_s, refuse)
        full: set[CandidateId] = set()
        num_tries: Counter[tuple[int, bool, bool]] = Counter()

        def is_closed(line: LineKey) -> bool:
            return line.candidate in full or num_tries[line[1:]] >= _NUM_TRIES

        for line, waiting in self._order.walk(is_closed):
            choice = choose(waiting, NOTHING)
            if choice is None:
                self.remove(waiting)
                if not has_time():
                    return False
                continue
            verdict = self.judge(waiting, choice, now_s)
            if verdict.goes and choice.view.id in full:  # a request before it waits for blocks
                verdict = Verdict(False, "window")
            if not verdict.goes:
                waiting.held_by = verdict.why
            self._put(waiting, choice)
            if verdict.goes:
                late_ms = self._late_ms(waiting, choice, now_s)
                if late_ms > 0.0 and choice.view.num_requests:
                    self._order.remove(waiting)
                    refuse(waiting, "deadline", late_ms)
                    continue
                self._go(waiting, choice, verdict, now_s, send)
                if not has_time():
                    return False
                num_tries.clear()
            elif verdict.why == "tbt" and self._has_waited_out(waiting, now_s):
                self._order.remove(waiting)
                refuse(waiting, "tbt", 0.0)
            elif verdict.why == "window" and choice.view.id not in full:
                full.add(choice.view.id)
            else:
                num_tries[line[1:]] += 1
        self._spread(now_s, choose, send, full)
        return True

    def publish_waiting(self, now_s: float) -> None:
        """Publish how many prompts wait here."""
        self._elsewhere.waits(self._order.num_by_candidate, now_s)

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
                in_front_ms = {each: self._order.work_ms(each) for each in full}
                in_front_ms[candidate] -= waiting.compute_ms
                if in_front_ms[candidate] <= 0.0:
                    break
                choice = choose(waiting, in_front_ms)
                if choice is None:
                    self._order.remove(waiting)
                    continue
                verdict, there = self.judge(waiting, choice, now_s), choice.view.id
                is_free = there not in full and not self._order.num_there(there, for_batch=True)
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
        self._book(waiting, choice, verdict, now_s)
        send(waiting, choice, verdict.why)

    def start(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        """Send a request that has just come, while the queue is empty.

        Same as `add` and `release`, but faster. If it may not go, it has to be added.
        """
        self._note_turn(waiting, now_s)
        verdict = self.judge(waiting, choice, now_s)
        if verdict.goes:
            self._book(waiting, choice, verdict, now_s)
        return verdict

    # Whether it may go

    def judge(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        """Return whether a request may go to a candidate now; it need not be in the queue."""
        if self._is_full(choice, now_s):
            return Verdict(False, "window")
        limit_ms = self._rules.tbt_ms
        if limit_ms is not None and (self.tbt_ms(waiting, choice, now_s) or 0.0) > limit_ms:
            return Verdict(False, "tbt")
        price_ms, why = 0.0, "room"
        if not self._fits(waiting, choice):
            price_ms, why = self._idle_price_ms(waiting, choice), "idle"
            if self._has_waited_out(waiting, now_s):
                price_ms, why = 0.0, "waited_out"
            elif not self._candidates.has_idle_time(choice.view.id, price_ms, now_s):
                return Verdict(False, "room")
        if not self._can_begin(waiting, choice, now_s):
            return Verdict(False, "window")
        return Verdict(True, why, price_ms)

    def _is_full(self, choice: C, now_s: float) -> bool:
        """Return whether a replica has enough requests ready.

        Work counts by the learned cost and by the replica's pace, because the learned cost of equal
        prompts can be close to nothing. Requests that were lost do not close the window for ever.
        """
        view, rules = choice.view, self._rules
        if view.num_waiting <= rules.window:
            return False
        if view.queue_ms < rules.ready_ms:
            if PACE_SHARE * self._candidates.queue_at_pace_ms(view.id) < rules.ready_ms:
                return False
        return self._candidates.num_ready(view.id, now_s) > rules.window

    def _can_begin(self, waiting: Waiting, choice: C, now_s: float) -> bool:
        """Return whether an engine has blocks for a request, or may hold it back itself.

        It may if it is about to idle, or if what it evicts is read back. A request that has waited
        for the maximum goes too: the known state of the blocks can be wrong.
        """
        view = choice.view
        reads_pool = view.num_pool_tokens is not None and view.reads_pool
        if view.queue_ms < IDLE_SOON_MS or reads_pool or self._candidates.reads_back(view.id):
            return True
        return self._has_waited_out(waiting, now_s) or self._has_blocks(waiting, choice)

    def tbt_ms(self, waiting: Waiting, choice: C, now_s: float) -> float | None:
        """Predict the inter-token latency of a request that goes now.

        None: nothing else is in flight where it is answered, or too little is known.
        """
        candidate = waiting.answers_at or choice.view.id
        return self._candidates.tbt_ms(candidate, waiting.num_tokens, now_s)

    def _fits(self, waiting: Waiting, choice: C) -> bool:
        """Return whether a cache has room for a request's conversation."""
        view, session, sets = choice.view, waiting.session, self._working_sets
        if session is None:
            return True
        num_before = sets.num_tokens_at(view.id, for_batch=waiting.is_batch)
        num_own = sets.num_own_tokens(session, waiting.num_tokens, view.num_gpu_tokens)
        in_cache = self._candidates.capacity_tokens(view.id)
        rules = waiting.rules or self._rules
        if in_cache is None or num_before + num_own <= rules.fill * in_cache:
            return True  # the usual case: what is behind the cache does not matter
        room = self._room(waiting, view.id)
        if sets.home(session) == view.id:
            if num_before <= room:
                return True
            num_before = sets.num_tokens_before(session, for_batch=waiting.is_batch)
        return not num_before or num_before + num_own <= room

    def _room(self, waiting: Waiting, candidate: CandidateId) -> float:
        """Return the tokens of a replica for the conversations that live there."""
        rules = waiting.rules or self._rules
        room = self._candidates.room_tokens(candidate, rules.fill)
        return inf if room is None else room

    def _idle_price_ms(self, waiting: Waiting, choice: C) -> float:
        """Return the idle time after which a prompt goes that does not fit.

        Such a prompt evicts conversations, which are computed again later. So the price is
        `PATIENCE x own_ms x num_there x scarcity ** 3`: the prompt's own compute time, the number
        of requests that wait there at all routers, and scarcity. Scarcity is the time to compute
        all conversations that the cache has room for, divided by the time in which they come back.
        Below 1 an engine could do without its cache.
        """
        there, sets = choice.view.id, self._working_sets
        own_ms = _compute_ms(choice, waiting.num_tokens)
        num_tokens = max(1.0, sets.num_tokens_at(there))
        fitting = min(1.0, self._room(waiting, there) / num_tokens)
        scarcity = 1e-3 * own_ms * sets.at(there).num_sessions * fitting / sets.cycle_s
        num_there = self._order.num_there(there, for_batch=waiting.is_batch)
        num_there = max(1, num_there + self._elsewhere.num_waiting(there))
        return PATIENCE * num_there * own_ms * scarcity**3

    def _has_waited_out(self, waiting: Waiting, now_s: float) -> bool:
        longest_s = self._rules.longest_wait_s(is_batch=waiting.is_batch)
        return now_s - waiting.since_s >= longest_s

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
        own_ms = _compute_ms(choice, waiting.num_tokens)
        place = waiting.place
        if not place.number:  # not in the queue
            is_spent = self._order.is_spent(waiting.caller)
            place = place._replace(level=waiting.level, is_spent=is_spent,
                                   length_ms=own_ms + _cost(choice).fetch_ms,
                                   number=self._num_added + 1)  # fmt: skip
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
                self._order.remove(waiting)
                refuse(waiting, "deadline", 1e3 * (now_s - latest_s))

    @staticmethod
    def _late_ms(waiting: Waiting, choice: C, now_s: float) -> float:
        """Return by how much a request misses its deadline if it is sent now; 0.0: not at all."""
        if waiting.deadline_s is None:
            return 0.0
        return max(0.0, 1e3 * (now_s - waiting.deadline_s) + _ttft_ms(choice))

    # Bookkeeping

    def _put(self, waiting: Waiting, choice: C) -> None:
        """Move a request to the line of the candidate that was chosen."""
        own_ms, read_ms = _compute_ms(choice, waiting.num_tokens), _cost(choice).fetch_ms
        is_home = self._is_home(waiting, choice.view.id)
        self._order.put(waiting, choice.view.id, own_ms, read_ms, is_home=is_home)

    def _book(self, waiting: Waiting, choice: C, verdict: Verdict, now_s: float) -> None:
        """Charge a sent request to idle time and its caller's share."""
        if verdict.price_ms:
            self._candidates.spend_idle_time(choice.view.id, verdict.price_ms, now_s)
            self._elsewhere.spent(choice.view.id, verdict.price_ms)
        self._order.charge(waiting, _compute_ms(choice, waiting.num_tokens))

    def _note_turn(self, waiting: Waiting, now_s: float) -> None:
        """Record that a conversation goes on: its pause is over."""
        if waiting.session is not None:
            self._working_sets.asked(waiting.session, now_s)

    def _is_home(self, waiting: Waiting, candidate: CandidateId | None) -> bool:
        """Return whether a conversation lives at a candidate; None: it will be chosen later."""
        home = None if waiting.session is None else self._working_sets.home(waiting.session)
        return home is not None and candidate in (None, home)


def _ttft_ms(choice: Choice) -> float:
    """Return the predicted time to a first token at the chosen candidate."""
    return _cost(choice).ttft_ms


def _cost(choice: Choice) -> CandidateCost:
    """Return what the chosen candidate costs."""
    return next(cost for cost in choice.costs() if cost.id == choice.view.id)


def _compute_ms(choice: Choice, num_tokens: int) -> float:
    """Predict how long a prompt occupies an engine; at least 1 ms.

    Fetching blocks does not occupy it: it computes other prompts meanwhile.
    """
    view = choice.view
    num_held = view.num_cached_tokens
    cost = view.cost
    return max(1.0, cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms)
