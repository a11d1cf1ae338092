"""Requests that wait in the router, and which of them may go.

A request goes to the candidate that its policy chooses, by the caches and queues of the moment it
leaves, as soon as two things hold there:

1. **The window is open.** Requests inside an engine cannot be put in another order, and what they
   count on is evicted while they wait. So an engine has one ready beside the one it computes; or
   several short ones, which it computes in one step, up to `ready_ms` of work, by the learned cost
   and, as that can be next to nothing, by how long the last prompts took. And it has blocks
   for the prompt beside what it has, or that would wait there, and all behind it; not so where the
   engine would soon have nothing to do, nor with a pool, which gives back what is evicted
   meanwhile.
2. **It fits.** The conversations that live there, this one included, take no more than `fill` of
   the cache; of those that have outgrown it the last that came waits. For an interactive one those
   of class batch take none of it; they wait for all interactive ones. Or there is compute to spare:
   a prompt that does not fit goes when its engine has been idle for as long as its price since the
   last one that went so (`router.replicas.ledger`). The price is what it takes to compute, times
   the prompts that wait there (for an interactive one, interactive ones), times the cube of how
   scarce compute is, times `patience`.
   Scarcity is how long the engine would take to compute anew all conversations that its cache has
   room for, over the time in which each of them comes back. At 1 an engine without a cache would
   just keep up; so the cube is small where the cache is hardly needed, and nothing waits for
   room, and large where a prompt without room would cost more of those that have it than it is
   worth. What falls out and is then read, from a pool or the engine's CPU memory, is not computed
   again: the price is less by as much as reading is quicker, of what others came back for and
   found there.

A window hides who waits for it from policies: they see what an engine has. So those at the ends of
lines before full windows are placed once more, what is in front of them counted: one goes at once
where it is computed, or copied, sooner than its turn would come, if it fits there and none waits.

First go interactive requests, of these first those of the highest priority, then those of tenants
that have not had their share (`router.scheduling.shares`, among tenants of one priority), then
those that take the least, to read what is held and to compute the rest, by the learned cost: so
the sum of all waits is the least, and what is cached is used while it is there. Of those that are
alike to a tenth the first that came goes. One that has waited for `max_wait_s` goes before
all, in the order of arrival, and needs no room; one of class batch after `batch_max_wait_s`.

A request with a deadline is refused as soon as its first token is predicted to come later: when it
comes, from time to time while it waits, and before it is sent. With a limit on the time between
tokens one waits whose answer would be slower, at the load of the moment when its prompt has been
computed: all that is in flight where it is answered decodes then. It is refused as soon as it is
predicted to wait so for longer than `max_wait_s` (batch: `batch_max_wait_s`), or past its deadline:
until as many answers have ended as requests are in front of it, and one more. But an engine that
has nothing to do takes it: only a try can tell that the prediction was wrong.

Variants of an experiment may have another window, fill and patience. They say when a request of the
variant may go; what is in a window, and what lives in a cache, is of all variants.

What must live here: that rule. What must not: a clock, tasks, how a request is placed or sent. The
router and the simulator use the same queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from policies.view import CandidateId, ReplicaView
from router.replicas.conversations import Conversations
from router.replicas.ledger import NOTHING, InFront
from router.scheduling.forecast import Forecast
from router.scheduling.lines import Lines
from router.scheduling.shares import Shares
from router.scheduling.waiting import (
    Candidates,
    Choice,
    Group,
    QueueRules,
    Waiting,
    compute_ms,
    level_of,
    middle_ms,
    read_ms,
    read_ratio,
    step_of,
)

_NUM_TRIES: Final = 8  # requests of a level placed in vain that live there, or of the others
_NUM_ALL_TRIES: Final = 24  # the same of all levels, before a release is over
_NUM_GONE: Final = 64  # likewise requests that cannot be placed
_NUM_MOVES: Final = 2  # ends of lines that are placed once more in vain, before a release is over
_NUM_CHECKS: Final = 4  # of deadlines, in a release
_CHECK_AGAIN_S: Final = 0.05  # at the soonest
_ON_THE_WAY_MS: Final = 60.0
"""An engine with less at work gets a prompt that it has no blocks for yet. It would have nothing to
do by the time that the next answer's end is known here and a prompt has come to it."""

_PACE_SHARE: Final = 0.5
"""So much of what work takes at an engine's pace is sure: single short prompts, which have a step
each, make it slow, and several share one."""

_RELOAD_DECAY: Final = 0.95  # half of the weight lies on the last 14 turns
_since = attrgetter("since_s")


class Verdict(NamedTuple):
    """Whether a request may go, and why.

    `why` it goes: room, idle (compute to spare), waited_out; what it waits for: window, tbt
    (answers there are slow), room. `price_ms` is the idle time that it takes.
    """

    goes: bool
    why: str
    price_ms: float = 0.0


Limit = Literal["deadline", "tbt"]


class Outlook(NamedTuple):
    """What is predicted of a request that waits.

    `ttft_ms` is from now; `wait_ms` of it is for prompts in front. `spare_ms`: by how much it will
    keep its limits; negative: it will not, and is refused for `limit`.
    """

    ttft_ms: float
    wait_ms: float
    spare_ms: float
    limit: Limit


C = TypeVar("C", bound=Choice)


class Queue(Generic[C]):
    """The requests that wait.

    They stand in `Lines`: what a release takes depends on who goes, not on how many wait.

    Args:
        rules: When one may go.
        working_sets: What lives where.
        candidates: What is known of these.
        has_room: Whether the engine chosen could begin a request beside what it has; None: all.
    """

    __slots__ = ("_by_tenant", "_candidates", "_checks", "_forecast", "_has_room", "_kept_ratio",
                 "_lines", "_max_wait_s", "_num_added", "_num_at", "_num_batch", "_num_changed",
                 "_pooled_ratio", "_rules", "_shares", "_widest", "_working_sets")  # fmt: skip

    def __init__(
        self,
        rules: QueueRules,
        working_sets: Conversations,
        candidates: Candidates,
        has_room: Callable[[Waiting, C], bool] | None = None,
    ) -> None:
        self._rules = rules
        self._widest = rules.window  # of those of all who have waited
        self._max_wait_s = (rules.max_wait_s, rules.batch_max_wait_s)
        self._working_sets = working_sets
        self._candidates = candidates
        self._has_room = has_room
        self._lines = Lines(self._max_wait_s)
        # By priority, tenant and number; none empty.
        self._by_tenant: dict[int, dict[str, dict[int, Waiting]]] = {}
        self._shares: dict[int, Shares] = {}  # by priority: tenants of one take turns
        self._num_at: Counter[int] = Counter()  # by level, none 0
        self._num_added = self._num_batch = 0
        self._pooled_ratio = 0.0  # of what conversations had computed: a pool has so much
        self._kept_ratio = 0.0  # of what engines' caches lost of it: CPU memory has so much
        self._num_changed = 0  # times that a tenant was spent, or was no more
        self._forecast = Forecast()
        self._checks: list[tuple[float, int, Waiting]] = []  # of deadlines: when, number

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_batch(self) -> int:
        """Count those of class batch."""
        return self._num_batch

    def add(self, waiting: Waiting) -> None:
        """Let a request wait that has just come; if it has limits, see `expect`."""
        self._num_added += 1
        waiting.number = self._num_added
        waiting.is_spent = self.is_spent(waiting.tenant, waiting.priority)
        if waiting.rules is not None:
            self._widest = max(self._widest, waiting.rules.window)
        waiting.group = Group(None, True, waiting.rank, 0, self._lives_at(waiting, None))
        self._num_batch += waiting.is_batch
        self._num_at[waiting.level] += 1
        of_priority = self._by_tenant.setdefault(waiting.priority, {})
        of_priority.setdefault(waiting.tenant, {})[waiting.number] = waiting
        if waiting.session is not None:
            self._working_sets.asked(waiting.session, waiting.since_s)
        self._lines.add(waiting)

    def is_spent(self, tenant: str, priority: int = 0) -> bool:
        """Return whether a tenant has had its share: others of its priority go first."""
        shares = self._shares.get(priority)
        return shares is not None and shares.is_spent(tenant)

    def has_limits(self, waiting: Waiting) -> bool:
        """Return whether a request may be refused for what is predicted of it."""
        return waiting.deadline_s is not None or self._rules.tbt_ms is not None

    def expect(self, waiting: Waiting, choice: C, now_s: float) -> Outlook | None:
        """Predict whether a request that has just come will keep its limits.

        If not, it is to be refused; it is still in the queue. None: it has no limits, or goes to
        an engine that has nothing to do.
        """
        if not self.has_limits(waiting):
            return None
        self._put(waiting, choice)
        if self._is_taken_anyway(waiting, choice, now_s):
            self._check_again(waiting, 0.0, now_s)
            return None
        outlook = self.outlook(waiting, choice, now_s)
        if outlook.spare_ms >= 0.0:
            if waiting.deadline_s is not None:
                waiting.expected_ms = outlook.wait_ms
            self._check_again(waiting, outlook.spare_ms, now_s)
        return outlook

    def outlook(self, waiting: Waiting, choice: C, now_s: float) -> Outlook:
        """Predict when a request has its first token, and whether it keeps its limits."""
        ttft_ms, wait_ms = self._forecast.first_token_ms(self._lines.groups, waiting, choice)
        spare_ms = inf
        limit: Limit = "deadline"
        if self._rules.tbt_ms is not None:
            max_wait_s = self._max_wait_s[waiting.is_batch]
            left_ms = 1e3 * (waiting.since_s + max_wait_s - now_s)
            spare_ms = max(0.0, left_ms)  # of an answer that is quick enough so far
            answer_wait_ms = self._answer_wait_ms(waiting, choice, now_s)
            if answer_wait_ms is not None:
                ttft_ms = max(ttft_ms, answer_wait_ms + _own_ttft_ms(choice))
                spare_ms, limit = left_ms - answer_wait_ms, "tbt"
        if waiting.deadline_s is not None:
            spare_ms = min(spare_ms, 1e3 * (waiting.deadline_s - now_s) - ttft_ms)
        return Outlook(ttft_ms, wait_ms, spare_ms, limit)

    def _answer_wait_ms(self, waiting: Waiting, choice: C, now_s: float) -> float | None:
        """Predict how long a request waits until answers are quick enough; None: they are.

        Until so many have ended as are in front of it, and one more.
        """
        if not self._is_slow(waiting, choice, now_s):
            return None
        per_s = self._candidates.ends_per_s(waiting.answers_at or choice.view.id)
        if not per_s:
            return 0.0  # not known
        offered = {cost.id for cost in choice.costs()}
        num_ahead, own_rank = 0, waiting.rank
        for name, group in self._lines.groups.items():
            if name.candidate in offered and name.rank < own_rank:
                num_ahead += len(group)
            elif name.candidate in offered and name.rank == own_rank:
                num_ahead += bisect_left(group, waiting.since_s, key=_since)
        return 1e3 * (num_ahead + 1) / per_s

    def _is_slow(self, waiting: Waiting, choice: C, now_s: float) -> bool:
        """Return whether a request that goes now would be answered too slowly."""
        limit_ms = self._rules.tbt_ms
        tbt_ms = self.tbt_ms(waiting, choice, now_s) if limit_ms is not None else None
        return limit_ms is not None and tbt_ms is not None and tbt_ms > limit_ms

    def tbt_ms(self, waiting: Waiting, choice: C, now_s: float) -> float | None:
        """Predict the time between tokens of a request that goes now, from its first one on.

        None: nothing else is in flight where it is answered, or too little is known.
        """
        candidate = waiting.answers_at or choice.view.id
        return self._candidates.tbt_ms(candidate, waiting.num_tokens, now_s)

    def remove(self, waiting: Waiting) -> None:
        """Forget a request: it is sent, or its client has left. Once more has no effect."""
        if waiting.number in self._lines:
            self._lines.remove(waiting)
            self._num_batch -= waiting.is_batch
            self._num_at[waiting.level] -= 1
            if not self._num_at[waiting.level]:
                del self._num_at[waiting.level]
            of_priority = self._by_tenant[waiting.priority]
            of_tenant = of_priority[waiting.tenant]
            del of_tenant[waiting.number]
            if not of_tenant:
                del of_priority[waiting.tenant]
            if not of_priority:
                del self._by_tenant[waiting.priority]

    def refused_for(self, *, is_batch: bool, priority: int = 0) -> Waiting | None:
        """Return the request that is refused to make place for one that comes.

        One of a lower class, or of its class and a lower priority: of the lowest that wait first
        those of tenants that have had their share, then those that take the longest, reading
        included, to a tenth, then those that live nowhere; the last that came. O(groups).

        Returns:
            None: none is lower.
        """
        lowest = max(self._num_at, default=-1)
        if lowest <= level_of(is_batch=is_batch, priority=priority):
            return None
        groups = self._lines.groups
        return groups[max(groups, key=_price)][-1]

    def release(
        self,
        now_s: float,
        choose: Callable[[Waiting, InFront], C | None],
        send: Callable[[Waiting, C, str], None],
        refuse: Callable[[Waiting, Limit, float], None],
        has_time: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Send all that may go, and refuse those whose limits cannot be kept any more.

        False: there was no time for all of it.

        Args:
            now_s: Now.
            choose: Places a request by what is known now, and by what is in front of it here; None:
                it is of no concern any more.
            send: Takes a request, the candidate chosen and why it may go, and books it; it has left
                the queue then.
            refuse: Takes a request that has left the queue so, for which limit (see `Outlook`),
                and after how many milliseconds more it might have been kept.
            has_time: Asked after each that was sent: whether to go on.
        """
        self._working_sets.expire(now_s)
        self._lines.note_late(now_s)
        self._check_deadlines(now_s, choose, refuse)
        full: set[CandidateId | None] = set()
        seen: set[int] = set()
        behind, num_changed = False, self._num_changed
        while not behind or self._num_batch:
            num_gone = 0
            # By level, and whether they live there: who waits for room stops the like of it alone.
            num_tries: Counter[tuple[int, bool]] = Counter()
            over: set[tuple[int, bool]] = set()
            for waiting in self._lines.in_order(full, over, behind=behind):
                if waiting.number in seen:
                    continue  # it was put into another group
                seen.add(waiting.number)
                alike = waiting.group.alike
                choice = choose(waiting, NOTHING)
                if choice is None:
                    self.remove(waiting)
                    num_gone += 1
                    if num_gone >= _NUM_GONE:
                        break
                    continue
                view = choice.view
                self._put(waiting, choice)
                verdict = self.judge(waiting, choice, now_s)
                if verdict.goes and view.id in full:
                    verdict = Verdict(False, "window")  # one before it waits for blocks there
                if verdict.goes:
                    excess_ms = self._excess_ms(waiting, choice, now_s)
                    if excess_ms > 0.0 and view.num_requests:
                        self._end_wait(waiting, now_s)
                        refuse(waiting, "deadline", excess_ms)
                        continue
                    self._send(waiting, choice, verdict, now_s, send)
                    if not has_time():
                        return False
                    num_tries.clear()
                    continue
                waiting.held_by = verdict.why
                is_widest = self._rules_of(waiting).window >= self._widest
                if verdict.why == "window" and is_widest and view.id not in full:
                    full.add(view.id)
                    continue
                if verdict.why == "tbt":
                    waiting.expected_ms = None  # of prompts in front of it, this wait says nothing
                num_tries[alike] += 1
                if num_tries.total() >= _NUM_ALL_TRIES:
                    break
                if num_tries[alike] >= _NUM_TRIES:
                    over.add(alike)
            if self._num_changed != num_changed:
                num_changed = self._num_changed  # another order: who is next was not seen
            elif behind:
                break
            else:
                behind = True
        if full:
            self._move_on(now_s, choose, send, full)
        return True

    def _move_on(
        self,
        now_s: float,
        choose: Callable[[Waiting, InFront], C | None],
        send: Callable[[Waiting, C, str], None],
        full: set[CandidateId | None],
    ) -> None:
        """Send those at the ends of lines elsewhere that have too much in front of them.

        Of each group the last one stands at its end. Those with the most in front come first. None
        takes another's turn: where some wait, or idle time is to be spent, these come first.
        """
        ends, lines_ms = self._lines.ends(full)
        num_in_vain = 0
        for ahead_ms, there, name in ends:
            own_ms = middle_ms(name.step)
            while group := self._lines.groups.get(name):
                waiting = group[-1]
                ahead_ms -= own_ms
                if ahead_ms <= 0.0:
                    break  # it is the first
                choice = choose(waiting, {**lines_ms, there: ahead_ms})
                if choice is None:
                    self.remove(waiting)
                    continue
                verdict = Verdict(False, "window")
                if self._is_open(choice.view.id, full):
                    verdict = self.judge(waiting, choice, now_s)
                is_in_turn = verdict.goes and not verdict.price_ms
                if not is_in_turn or self._excess_ms(waiting, choice, now_s) > 0.0:
                    num_in_vain += 1
                    break
                self._put(waiting, choice)
                self._send(waiting, choice, verdict, now_s, send)
                lines_ms[there] -= own_ms
            if num_in_vain >= _NUM_MOVES:
                return

    def _is_open(self, candidate: CandidateId, full: set[CandidateId | None]) -> bool:
        """Return whether a window is open for which none waits."""
        return candidate not in full and not self._lines.num_there(candidate, for_batch=True)

    def pass_by(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        """Let a request go that has just come, without limits, while no other waits.

        What `add` and `release` would do of it, but for its place among others: it had none. If it
        may not go, it has to be added.
        """
        if waiting.session is not None:
            self._working_sets.asked(waiting.session, now_s)
        verdict = self.judge(waiting, choice, now_s)
        if verdict.goes:
            waiting.compute_ms = compute_ms(choice, waiting.num_tokens)
            self._book(waiting, choice, verdict.price_ms, now_s)
        return verdict

    def _send(
        self,
        waiting: Waiting,
        choice: C,
        verdict: Verdict,
        now_s: float,
        send: Callable[[Waiting, C, str], None],
    ) -> None:
        """Let a request go that has waited."""
        self._end_wait(waiting, now_s)
        self._book(waiting, choice, verdict.price_ms, now_s)
        send(waiting, choice, verdict.why)

    def _end_wait(self, waiting: Waiting, now_s: float) -> None:
        """Take a request out, and learn from how long it has waited."""
        self.remove(waiting)
        self._forecast.learn(waiting, now_s)

    def _book(self, waiting: Waiting, choice: C, price_ms: float, now_s: float) -> None:
        """Take from idle time and its tenant's share what a request needs that goes now."""
        if price_ms:
            self._candidates.spend_idle_time(choice.view.id, price_ms, now_s)
        self._charge(waiting)
        self._look_at_reloads(waiting, choice)

    def judge(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        """Return whether a request may go to a candidate now; it need not be in the queue."""
        verdict = self._judge(waiting, choice, now_s)
        if verdict.goes and not self._can_begin(waiting, choice, now_s):
            return Verdict(False, "window")
        return verdict

    def _can_begin(self, waiting: Waiting, choice: C, now_s: float) -> bool:
        """Return whether an engine has blocks for a request, or is to let it wait itself.

        It is where nothing is lost meanwhile, for a pool gives it back; where it would soon have
        nothing to do; and where what is believed to be in use may be wrong.
        """
        if self._has_room is None or choice.num_pooled_tokens is not None:
            return True
        view = choice.view
        if not view.num_requests or self._candidates.capacity_tokens(view.id) is None:
            return True
        if view.queue_ms < _ON_THE_WAY_MS:
            return True
        return self._is_late(waiting, now_s) or self._has_room(waiting, choice)

    def _judge(self, waiting: Waiting, choice: C, now_s: float) -> Verdict:
        view = choice.view
        rules = self._rules_of(waiting)
        if view.num_waiting > rules.window and self._has_enough(view, rules.ready_ms):
            # Of these only what may have a first token soon: others could keep it closed for ever.
            if self._candidates.num_ready(view.id, now_s) > rules.window:
                return Verdict(False, "window")
        if self._is_slow(waiting, choice, now_s):
            return Verdict(False, "tbt")
        capacity = self._candidates.capacity_tokens(view.id)
        session, working_sets = waiting.session, self._working_sets
        if capacity is None or session is None:
            return Verdict(True, "room")
        room = rules.fill * capacity
        num_own = working_sets.num_own_tokens(session, waiting.num_tokens, view.num_gpu_tokens)
        num_before = working_sets.num_tokens_at(view.id, for_batch=waiting.is_batch)
        if working_sets.home(session) == view.id:
            if num_before <= room:
                return Verdict(True, "room")
            num_before = working_sets.num_tokens_before(session, for_batch=waiting.is_batch)
        if not num_before or num_before + num_own <= room:
            return Verdict(True, "room")
        if self._is_late(waiting, now_s):
            return Verdict(True, "waited_out")
        price_ms = self._lost_ratio(choice, num_own) * self._idle_price_ms(waiting, choice, room)
        if self._candidates.has_idle_time(view.id, price_ms, now_s):
            return Verdict(True, "idle", price_ms)
        return Verdict(False, "room")

    def _is_late(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether a request has waited for so long that it needs no room."""
        return now_s - waiting.since_s >= self._max_wait_s[waiting.is_batch]

    def _has_enough(self, view: ReplicaView, ready_ms: float) -> bool:
        """Return whether an engine has so much work ready, by the learned cost or its pace.

        Where cost is learned of few or like prompts it may be next to nothing: then all would go.
        """
        if view.queue_ms >= ready_ms:
            return True
        return _PACE_SHARE * self._candidates.queue_at_pace_ms(view.id) >= ready_ms

    def _lost_ratio(self, choice: C, num_tokens: int) -> float:
        """Return what a conversation costs that falls out, over what computing it anew would.

        Less where pool or CPU memory give it back, as far as others found theirs there, and that
        is quicker.
        """
        pooled = self._pooled_ratio * (1.0 - read_ratio(choice, num_tokens, from_pool=True))
        kept = self._kept_ratio * (1.0 - read_ratio(choice, num_tokens, from_pool=False))
        return 1.0 - max(pooled, kept)

    def _idle_price_ms(self, waiting: Waiting, choice: C, room: float) -> float:
        """Return after how much idle time a prompt goes that does not fit into `room` tokens.

        What it throws out of the cache others have to compute again, of whom each delays the rest
        and throws out something else. Its own time stands for theirs in `scarcity`.
        """
        rules, there, working_sets = self._rules_of(waiting), choice.view.id, self._working_sets
        took_ms = compute_ms(choice, waiting.num_tokens)
        num_tokens = max(1.0, working_sets.num_tokens_at(there))
        num_that_fit = working_sets.at(there).num_sessions * min(1.0, room / num_tokens)
        scarcity = 1e-3 * took_ms * num_that_fit / working_sets.cycle_s
        num_there = self._lines.num_there(there, for_batch=waiting.is_batch)
        num_there = max(1, num_there)  # with itself, in the queue or not
        return rules.patience * num_there * took_ms * scarcity**3

    def _rules_of(self, waiting: Waiting) -> QueueRules:
        return waiting.rules if waiting.rules is not None else self._rules

    # Deadlines

    def _check_deadlines(
        self,
        now_s: float,
        choose: Callable[[Waiting, InFront], C | None],
        refuse: Callable[[Waiting, Limit, float], None],
    ) -> None:
        """Refuse those whose limits cannot be kept any more; a few are looked at."""
        for _ in range(_NUM_CHECKS):
            while self._checks and self._checks[0][1] not in self._lines:
                heappop(self._checks)
            if not self._checks or self._checks[0][0] > now_s:
                return
            _, _, waiting = heappop(self._checks)
            choice = choose(waiting, NOTHING)
            if choice is None:
                self.remove(waiting)
                continue
            self._put(waiting, choice)
            if self._is_taken_anyway(waiting, choice, now_s):
                self._check_again(waiting, 0.0, now_s)  # if it does not go in this release
                continue
            outlook = self.outlook(waiting, choice, now_s)
            if outlook.spare_ms >= 0.0:
                self._check_again(waiting, outlook.spare_ms, now_s)
                continue
            self._end_wait(waiting, now_s)
            refuse(waiting, outlook.limit, -outlook.spare_ms)

    def _check_again(self, waiting: Waiting, spare_ms: float, now_s: float) -> None:
        """Plan to look at a deadline when half of the time is gone that there is to spare."""
        at_s = now_s + max(_CHECK_AGAIN_S, 0.5e-3 * spare_ms)
        heappush(self._checks, (at_s, waiting.number, waiting))

    def _is_taken_anyway(self, waiting: Waiting, choice: C, now_s: float) -> bool:
        """Return whether an engine without a request could begin it now."""
        view = choice.view
        return not view.num_requests and self.judge(waiting, choice, now_s).goes

    @staticmethod
    def _excess_ms(waiting: Waiting, choice: C, now_s: float) -> float:
        """Return by how much a request would miss its deadline that is sent now; 0.0: it would not.

        At the candidate chosen: it goes nowhere else.
        """
        if waiting.deadline_s is None:
            return 0.0
        return max(0.0, 1e3 * (now_s - waiting.deadline_s) + _own_ttft_ms(choice))

    # Where they stand

    def _put(self, waiting: Waiting, choice: C) -> None:
        """Note where a request would go now, and how long it would take there."""
        view = choice.view
        waiting.compute_ms = compute_ms(choice, waiting.num_tokens)
        step = step_of(waiting.compute_ms + read_ms(choice))
        in_time, lives_there = waiting.group.in_time, self._lives_at(waiting, view.id)
        self._lines.put(waiting, Group(view.id, in_time, waiting.rank, step, lives_there))

    def _lives_at(self, waiting: Waiting, candidate: CandidateId | None) -> bool:
        """Return whether the conversation of a request lives at a candidate.

        None: it was not placed yet, and will most likely want to go where it lives.
        """
        home = None if waiting.session is None else self._working_sets.home(waiting.session)
        return home is not None and candidate in (None, home)

    def _charge(self, waiting: Waiting) -> None:
        """Take what is sent from its tenant's share, and move those whose rank that changes."""
        shares = self._shares.get(waiting.priority)
        if shares is None:
            shares = self._shares[waiting.priority] = Shares(1e3 * self._rules.quantum_s)
        of_priority = self._by_tenant.get(waiting.priority, {})
        changed = shares.charge(
            waiting.tenant, waiting.weight, waiting.compute_ms, of_priority.keys()
        )
        self._num_changed += len(changed)
        for tenant in changed:
            for each in of_priority.get(tenant, {}).values():
                each.is_spent = shares.is_spent(tenant)
                self._lines.put(each, each.group._replace(rank=each.rank))

    def _look_at_reloads(self, waiting: Waiting, choice: C) -> None:
        """Learn how much of what a conversation had computed the engine can read again.

        Of the pool it is all of it that counts, of CPU memory what the engine's cache has lost.
        """
        session, view = waiting.session, choice.view
        num_known = self._working_sets.num_last_tokens(session) if session is not None else None
        if session is None or not num_known:
            return
        if choice.num_pooled_tokens is not None:
            ratio = min(1.0, choice.num_pooled_tokens / num_known)
            self._pooled_ratio += (1.0 - _RELOAD_DECAY) * (ratio - self._pooled_ratio)
        num_lost = num_known - view.num_gpu_tokens
        if num_lost > 0 and self._working_sets.home(session) == view.id:
            num_kept = max(0, min(num_known, view.num_cpu_tokens) - view.num_gpu_tokens)
            weight = (1.0 - _RELOAD_DECAY) * num_lost / num_known
            self._kept_ratio += weight * (num_kept / num_lost - self._kept_ratio)


def _own_ttft_ms(choice: Choice) -> float:
    """Return the predicted time to a first token at the candidate chosen, sent now."""
    [own] = [cost for cost in choice.costs() if cost.id == choice.view.id]
    return own.ttft_ms


def _price(name: Group) -> tuple[int, int, bool]:
    """Order groups by rank, by what their requests take, and by whether they live nowhere."""
    return name.rank, name.step, not name.lives_there
