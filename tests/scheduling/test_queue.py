from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from policies import CandidateId, CostModel, ReplicaView
from policies.cost import candidate_costs
from policies.view import CandidateCost, RequestView, Snapshot
from router.base.caller import Caller
from router.replicas.replica import Replica, candidates_of
from router.request.place import with_room
from router.scheduling import order
from router.scheduling.conversations import Conversations
from router.scheduling.queue import Elsewhere, Limit, Outlook, Queue
from router.scheduling.rules import IDLE_SOON_MS
from router.scheduling.waiting import (
    ANYWHERE,
    NOTHING,
    READY_MS,
    VISITS,
    InFront,
    QueueRules,
    Waiting,
    Where,
)

A, B = CandidateId("a"), CandidateId("b")
COST = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
CAPACITY = 10_000


class Chosen(Struct):
    view: ReplicaView
    num_tokens: int = 1

    def costs(self) -> tuple[CandidateCost, ...]:
        return candidate_costs(
            Snapshot(now_s=0.0, number=0, seed=0, replicas=(self.view,),
                     request=RequestView(num_tokens=self.num_tokens))
        )  # fmt: skip


class Others(Elsewhere):
    """The queues of other routers: what waits there, and what is published to them."""

    def __init__(self) -> None:
        self.num = 0
        self.first: float | None = None
        self.published: list[Any] = []

    def num_waiting(self, now_s: float) -> int:
        return self.num

    def first_s(self, now_s: float) -> float | None:
        return self.first

    def waits(self, num: int, first_s: float | None, now_s: float) -> None:
        self.published.append((num, first_s))

    def asked(self, session: int, *, has_room: bool) -> None:
        self.published.append((session, has_room))


class Stage:
    """A queue before two busy replicas. Requests are names; `wants` says where they go."""

    def __init__(self, **rules: Any) -> None:
        self.sets = Conversations()
        self.num_waiting = {A: 0, B: 0}  # requests before their first token
        self.lost = {A: 0, B: 0}  # of these, requests whose first token will not come
        self.queue_ms = {A: READY_MS, B: READY_MS}
        self.pace_ms = {A: 0.0, B: 0.0}  # work at the replica's recent pace
        self.num_requests = {A: 1, B: 1}
        self.tbt: dict[CandidateId, float | None] = {A: None, B: None}
        self.capacity: int | None = CAPACITY
        self.num_behind = 0  # tokens in a CPU tier, beyond the cache
        self.num_free = {A: CAPACITY, B: CAPACITY}  # tokens that no request uses
        self.wants: dict[str, CandidateId] = {}
        self.bears_ms = inf  # work in front of a request that wants to go there
        self.cached: dict[str, int] = {}
        self.pooled: dict[str, int] = {}
        self.is_read_back = False
        self.sent: list[str] = []
        self.why: list[str] = []
        self.refused: list[tuple[str, Limit]] = []
        self.is_done = True  # the last release sent all that may go
        self.num_choices = 0
        self.is_free = False  # requests go to the other replica if theirs has no room
        self.commits = True  # False: what is sent fails
        self.others = Others()
        self.queue: Queue[Chosen] = Queue(
            QueueRules(**rules),
            self.sets,
            self,
            lambda waiting, choice: waiting.num_tokens <= self.num_free[choice.view.id],
            self.others,
        )

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        return self.capacity

    def room_tokens(self, candidate: CandidateId) -> int | None:
        return None if self.capacity is None else self.capacity + self.num_behind

    def reads_back(self, candidate: CandidateId) -> bool:
        return self.is_read_back

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        return self.num_waiting[candidate] - self.lost[candidate]

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        return self.pace_ms[candidate]

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        return self.tbt[candidate]

    def ask(self, name: str, num_tokens: int, *, session: int | None = None, at_s: float = 0.0,
            to: CandidateId = A, cached: int = 0, batch: bool = False, **fields: Any
            ) -> Waiting:  # fmt: skip
        """Add a request."""
        waiting = self.waiting(name, num_tokens, session=session, at_s=at_s, to=to, cached=cached,
                               batch=batch, **fields)  # fmt: skip
        self.queue.add(waiting)
        return waiting

    def waiting(self, name: str, num_tokens: int, *, session: int | None, at_s: float,
                to: CandidateId, cached: int, batch: bool = False, caller: str | None = None,
                weight: float = 1.0, priority: int = 0, is_new: bool = False,
                **fields: Any) -> Waiting:  # fmt: skip
        """Make a request; its conversation went on elsewhere before, unless `is_new`."""
        if session is not None and not is_new:
            self.sets.learn(session, to, 0, at_s)
        self.wants[name], self.cached[name] = to, cached
        sender = Caller(name=caller, weight=weight, priority=priority)
        return Waiting(name, session, num_tokens, at_s, is_batch=batch, caller=sender, **fields)

    def expect(self, name: str, num_tokens: int, within_s: float, *, at_s: float = 0.0,
               **fields: Any) -> Outlook:  # fmt: skip
        """Add a request with a deadline, as routers do."""
        waiting = self.ask(name, num_tokens, at_s=at_s, deadline_s=at_s + within_s, **fields)
        choice = self.choose(waiting)
        assert choice is not None
        return self.queue.expect(waiting, choice, at_s)

    def release(self, now_s: float = 0.0, *, at_most: int = 1_000) -> list[str]:
        """Release, and return the requests that were sent; there is time for `at_most`."""
        before = len(self.sent)
        self.is_done = self.queue.release(
            now_s,
            self.choose,
            lambda waiting, choice, why: self.send(waiting, choice.view.id, why, now_s),
            lambda waiting, limit, late_ms: self.refused.append((waiting.item, limit)),
            lambda: len(self.sent) - before < at_most,
        )
        return self.sent[before:]

    def release_each_s(self, begin_s: int, end_s: int) -> list[str]:
        """Open the window of both replicas once a second, and return what was sent."""
        sent = []
        for second in range(begin_s, end_s):
            self.num_waiting = {A: 1, B: 1}
            sent += self.release(float(second))
        return sent

    def lives(self, session: int, candidate: CandidateId, num_tokens: int, at_s: float = 0.0,
              *, batch: bool = False, runs: bool = False) -> None:  # fmt: skip
        """Have a conversation of two turns live at a replica; its pause is worth its room."""
        for _ in range(2):
            self.sets.begin(session, candidate, num_tokens, 0, at_s, cost_s=100.0, is_batch=batch)
            if not runs:
                self.sets.end(session, num_tokens, at_s)

    def choose(
        self, waiting: Waiting, in_front_ms: InFront = NOTHING, where: Where = ANYWHERE
    ) -> Chosen | None:
        self.num_choices += 1
        to = self.wants.get(waiting.item)
        if to is None:
            return None
        if in_front_ms.get(to, 0.0) > self.bears_ms:
            to = B if to == A else A
        if where.home is not None:
            to = where.home
        elif to in where.full and self.is_free:
            to = B if to == A else A
        cached = self.cached[waiting.item]
        view = ReplicaView(id=to, num_gpu_tokens=cached, num_cpu_tokens=cached, cost=COST,
                           num_requests=self.num_requests[to], queue_ms=self.queue_ms[to],
                           num_waiting=self.num_waiting[to],
                           num_pool_tokens=self.pooled.get(waiting.item))  # fmt: skip
        return Chosen(view, waiting.num_tokens)

    def send(self, waiting: Waiting, to: CandidateId, why: str, now_s: float) -> bool:
        self.why.append(why)
        self.sent.append(waiting.item)
        self.num_waiting[to] += 1
        if waiting.session is not None:
            num_cached = self.cached[waiting.item]
            self.sets.begin(waiting.session, to, waiting.num_tokens, num_cached, now_s,
                            cost_s=100.0, is_visit=why in VISITS,
                            is_batch=waiting.is_batch)  # fmt: skip
        return self.commits


# -- the window ------------------------------------------------------------------------------


def test_a_replica_has_one_request_ready_beside_the_one_it_computes() -> None:
    """A full replica does not stop requests for another."""
    stage = Stage()
    for name in ("a1", "a2", "a3"):
        stage.ask(name, 100)
    stage.ask("b1", 100, to=B)

    assert stage.release() == ["a1", "a2", "b1"]
    stage.lost[A] = 1  # its first token will not come
    assert stage.release() == ["a3"]
    assert len(stage.queue) == 0


@pytest.mark.parametrize(("figure", "ms"), [("queue_ms", READY_MS), ("pace_ms", 2 * READY_MS)])
def test_more_requests_are_ready_while_they_are_little_work(figure: str, ms: float) -> None:
    """Work counts by the learned cost, and half of it by the replica's pace."""
    stage = Stage()
    stage.queue_ms[A] = 0.0
    stage.num_waiting[A] = 7
    getattr(stage, figure)[A] = ms - 1.0
    stage.ask("more", 100)
    assert stage.release() == ["more"]

    getattr(stage, figure)[A] = ms
    stage.ask("too much", 100)
    assert stage.release() == []


def test_a_request_without_free_blocks_waits_and_holds_up_longer_ones() -> None:
    stage = Stage()
    stage.num_free[A] = 900
    stage.ask("large", 1_000, cached=900)
    stage.ask("behind", 800, at_s=0.5)
    stage.ask("elsewhere", 1_000, to=B)

    assert stage.release(1.0) == ["elsewhere"]
    stage.num_free[A] = 1_000
    assert stage.release(1.1)[0] == "large"


@pytest.mark.parametrize(
    ("queue_ms", "waited_s", "is_read_back"),
    [(IDLE_SOON_MS - 1.0, 1.0, False), (99.0, 60.0, False), (99.0, 1.0, True)],
    ids=["the replica idles soon", "after the maximum wait", "with a CPU tier or a pool"],
)
def test_a_request_goes_without_free_blocks(
    queue_ms: float, waited_s: float, is_read_back: bool
) -> None:
    stage = Stage(max_wait_s=60.0)
    stage.is_read_back = is_read_back
    stage.num_free[A] = 0
    stage.queue_ms[A] = queue_ms
    stage.ask("large", 1_000)

    assert stage.release(waited_s) == ["large"]


def test_the_end_of_a_long_line_goes_to_a_replica_that_computes_it_sooner() -> None:
    """The policy sees the work in front of it; requests at the front of the line stay."""
    stage = Stage()
    stage.num_waiting = {A: 2, B: 2}
    stage.bears_ms = 250.0
    for number in range(6):
        stage.ask(f"{number}", 100)
    for _ in range(6):
        assert stage.release() == []
    stage.num_waiting[B] = -3

    assert stage.release() == ["5", "4", "3"]
    assert stage.num_waiting == {A: 2, B: 0}


# -- room ------------------------------------------------------------------------------------


def test_a_request_behind_others_that_wait_for_room_waits_for_room() -> None:
    """Though only the first is judged. A request that goes at once has waited for nothing."""
    stage = Stage(max_wait_s=1e6, fill=0.9)
    stage.lives(1, A, 8_000)
    stage.num_waiting = {A: 0, B: 0}
    first = stage.ask("first", 2_000, session=2)
    second = stage.ask("second", 2_000, session=3, at_s=0.05)

    assert stage.release(0.1) == []
    assert [first.held_by, second.held_by] == ["room", None]
    assert [stage.queue.held_by(each) for each in (first, second)] == ["room", "room"]
    stage.sets.finish(1)
    assert sorted(stage.release(1.0)) == ["first", "second"]
    stage.num_waiting = {A: 0, B: 0}
    third = stage.ask("third", 2_000, session=4, at_s=1.0)
    assert stage.release(1.0) == ["third"]
    assert [first.held_by, second.held_by, third.held_by] == ["room", "room", None]


def test_a_conversation_without_room_waits_until_another_has_left() -> None:
    """Conversations with room go on, and only where they have it."""
    stage = Stage(max_wait_s=1e6, fill=0.9)
    stage.lives(1, A, 5_000)
    stage.lives(2, A, 3_000)
    stage.ask("new", 2_000, session=3)
    stage.ask("old", 5_100, session=1, cached=5_000, to=B)

    later = stage.ask("later", 2_000, session=4)
    assert stage.release(0.1) == ["old"]
    assert stage.queue.num_before(later) == 1
    stage.num_waiting = {A: 0, B: 0}
    assert stage.release(1.0) == []
    assert stage.sets.home(1) == A
    stage.sets.finish(2)
    assert stage.release(1.1) == ["new"]
    assert stage.why == ["room", "room"]


def test_a_conversation_goes_where_there_is_room() -> None:
    stage = Stage()
    stage.is_free = True
    stage.lives(1, A, 9_000)
    stage.ask("new", 2_000, session=2)

    assert stage.release(0.1) == ["new"]
    assert stage.sets.home(2) == B


def test_of_conversations_that_outgrew_the_cache_the_last_that_came_gives_up_its_room() -> None:
    """It comes back before those that came later, and other routers learn of it."""
    stage = Stage(max_wait_s=1e6, fill=1.0)
    stage.lives(1, A, 5_000, 0.0)
    stage.lives(2, A, 5_000, 0.1)
    stage.ask("second", 5_100, session=2, at_s=0.2, cached=5_000)
    stage.ask("first", 5_100, session=1, at_s=0.2, cached=5_000)
    stage.ask("new", 4_950, session=3, at_s=0.3)

    assert stage.release(0.3) == ["first"]
    assert stage.sets.home(2) is None
    assert stage.others.published[:3] == [(2, True), (1, True), (3, False)]
    assert (2, False) in stage.others.published[3:]
    stage.num_waiting[A] = 0
    assert stage.release(0.4) == []  # nobody passes the first that waits for room
    stage.sets.remove(A)
    assert stage.release(0.5) == ["second"]


@pytest.mark.parametrize(
    ("session", "lives", "capacity"),
    [(1, 0, CAPACITY), (None, 9_000, CAPACITY), (1, 9_000, None)],
    ids=["alone in a cache", "without a session", "in a cache of unknown size"],
)
def test_a_request_always_fits(session: int | None, lives: int, capacity: int | None) -> None:
    stage = Stage()
    stage.capacity = capacity
    if lives:
        stage.lives(2, A, lives)
    stage.ask("huge", 9_900, session=session)

    assert stage.release() == ["huge"]
    assert stage.why == ["room"]


def test_a_cpu_tier_is_room_with_the_same_reserve() -> None:
    """`fill` leaves a share of the cache free, however large the tier is."""
    stage = Stage(fill=0.8)
    stage.num_behind = 3 * CAPACITY
    stage.lives(1, A, 30_000)
    stage.ask("too large", 8_001, session=2)
    assert stage.release(0.1) == []

    stage.ask("fits", 8_000, session=3, at_s=-10.0)
    assert stage.release(0.1) == ["fits"]


def test_a_variant_of_an_experiment_may_fill_more_of_a_cache() -> None:
    stage = Stage(fill=0.9)
    stage.lives(1, A, 8_000)
    stage.ask("variant", 2_000, session=3, fill=1.1)
    stage.ask("plain", 2_000, session=2)

    assert stage.release(0.1) == ["variant"]


@pytest.mark.parametrize(
    ("cost_ms", "num_tokens", "others", "goes"),
    [
        (READY_MS, 900, 0, False),
        (IDLE_SOON_MS - 1, 900, 0, True),
        (IDLE_SOON_MS - 1, 1_100, 0, False),
        (IDLE_SOON_MS - 1, 900, 1, True),
        (IDLE_SOON_MS - 1, 900, 9, False),
    ],
    ids=["busy", "idle", "idle without blocks", "computed within a turn", "delays many"],
)
def test_a_conversation_without_room_visits_a_replica_that_has_nothing_to_compute(
    cost_ms: float, num_tokens: int, others: int, goes: bool
) -> None:
    """If another one waits, for as long as a turn takes, summed over those with room."""
    stage = Stage(fill=0.8)
    num_there = max(1, others)
    for session in range(num_there):
        stage.lives(session, A, 9_000 // num_there)
    stage.others.num = others
    stage.queue_ms[A] = cost_ms
    stage.ask("visitor", num_tokens, session=20)

    assert bool(stage.release(0.1)) is goes
    assert stage.why == ["idle"] * goes
    stage.sets.end(20, num_tokens, 0.2)
    assert stage.sets.home(20) is None


@pytest.mark.parametrize(
    ("pause_s", "runs", "num_tokens", "goes"),
    [
        (None, False, 9_000, True),
        (600.0, False, 9_000, True),
        (5.0, False, 9_000, False),
        (None, True, 1_100, False),
        (None, True, 1_000, True),
    ],
    ids=["new", "pauses for long", "pauses as usual", "turns run", "turns leave space"],
)
def test_who_comes_for_a_single_turn_passes_those_that_wait_for_room(
    pause_s: float | None, runs: bool, num_tokens: int, goes: bool
) -> None:
    """It has no room after it."""
    stage = Stage(fill=0.9)
    stage.lives(1, A, 4_500 if runs else 9_000, at_s=600.0, runs=runs)  # two turns run, or none
    stage.ask("first", 5_000, session=2, at_s=600.0)
    assert stage.release(600.0) == []
    if pause_s is not None:
        stage.sets.begin(3, A, num_tokens, 0, 599.0 - pause_s)
        stage.sets.end(3, num_tokens, 600.0 - pause_s)
    stage.ask("turn", num_tokens, session=3, at_s=600.0, is_new=True)

    assert stage.release(600.0) == ["turn"] * goes
    assert stage.why == ["seldom"] * goes
    if goes:
        stage.sets.end(3, num_tokens, 601.0)
        assert stage.sets.home(3) is None


def test_a_single_turn_of_class_batch_waits_as_others_do() -> None:
    """It would take blocks of interactive conversations that pause."""
    stage = Stage(fill=0.9)
    stage.lives(1, A, 9_000)
    stage.ask("first", 5_000, session=2)
    stage.ask("batch", 1_000, session=3, is_new=True, batch=True)

    assert stage.release() == []


def test_large_single_turns_do_not_hold_up_small_ones() -> None:
    """Each is tried, the soonest computed first, up to 300 s of waiting."""
    stage = Stage(max_wait_s=1e6)
    stage.lives(1, A, 3_000, runs=True)  # twice
    stage.ask("waits", 5_000, session=2)
    stage.ask("large", 5_000, session=3, is_new=True)
    stage.ask("small", 1_000, session=4, at_s=100.0, is_new=True)

    assert stage.release(100.0) == ["small"]
    stage.sets.remove(A)
    assert stage.release(101.0)[:1] == ["waits"]


def test_a_request_visits_after_the_maximum_wait_if_the_window_is_open() -> None:
    """Nobody leaves for it, and it has no room afterwards."""
    stage = Stage(max_wait_s=10.0)
    stage.lives(1, A, 9_000, runs=True)
    stage.ask("first", 2_000, session=2)
    stage.ask("second", 2_000, session=3, at_s=0.1)
    assert stage.release(9.0) == []
    stage.num_waiting[A] = 2
    assert stage.release(9.5) == []

    stage.num_waiting[A] = 1
    assert stage.release(9.5) == ["first"]
    assert stage.why == ["waited_out"]
    stage.sets.end(2, 2_000, 9.5)
    assert (stage.sets.home(1), stage.sets.home(2)) == (A, None)
    stage.num_waiting[A] = 1
    assert stage.release(9.6) == ["second"]


def test_the_first_that_waits_at_another_router_is_not_passed() -> None:
    stage = Stage()
    stage.others.first = -1.0
    stage.ask("new", 100, session=1)
    assert stage.release(0.1) == []

    stage.queue.publish_waiting(0.1)
    assert stage.others.published == [(1, False), (1, 0.0)]
    stage.others.first = 1.0
    assert stage.release(0.2) == ["new"]


def test_a_sub_agent_waits_with_its_parents_ticket() -> None:
    stage = Stage(max_wait_s=1e6)
    stage.lives(1, A, 9_000)
    stage.ask("begins", 1_000, session=6, parent=1, at_s=0.5, is_new=True)
    assert stage.release(0.5) == ["begins"]
    stage.sets.end(6, 1_000, 0.6)
    stage.num_waiting[A] = 0
    stage.ask("other", 1_000, session=5, at_s=1.0)
    stage.ask("child", 1_000, session=6, at_s=2.0)
    for at_s in (2.0, 2.1):
        assert stage.release(at_s) == []
    stage.sets.finish(1)

    assert stage.release(3.0) == ["child", "other"]


def test_turns_that_overlap_may_go_to_several_replicas() -> None:
    """Sub-agents under one id are not held up at their parent's replica."""
    stage = Stage()
    stage.lives(1, A, 1_000, runs=True)
    stage.num_waiting[A] = 2
    stage.ask("stays", 1_100, session=1, at_s=1.0)
    stage.ask("goes", 1_100, session=1, to=B, at_s=1.0)

    assert stage.release(1.0) == ["goes"]


def test_a_client_that_leaves_ends_its_turn() -> None:
    """Its conversation keeps its room for a pause, and the next turn is another one."""
    stage = Stage()
    stage.lives(1, A, 1_000)
    stage.num_waiting[A] = 2
    stage.queue.remove(stage.ask("left", 1_100, session=1, at_s=1.0), 2.0)

    found = stage.sets.last(1)
    assert found is not None
    assert (found.is_open, stage.sets.home(1)) == (False, A)
    stage.sets.expire(1_000.0)
    assert stage.sets.home(1) is None


def test_what_could_not_be_sent_is_not_charged() -> None:
    stage = Stage()
    stage.commits = False
    for number in range(3):
        stage.ask(f"refused{number}", 9_000, caller="refused")
    stage.release_each_s(0, 3)
    stage.commits = True
    stage.num_waiting[A] = 2
    stage.ask("other", 1_000, caller="other", at_s=3.0)
    stage.ask("first", 1_000, caller="refused", at_s=2.9)

    assert stage.release_each_s(4, 6) == ["first", "other"]


# -- the order -------------------------------------------------------------------------------


def test_a_first_prompt_goes_before_longer_ones_until_one_has_waited_for_the_maximum() -> None:
    """The length is what has to be computed at that moment."""
    stage = Stage(max_wait_s=100.0)
    stage.num_waiting[A] = 2
    stage.ask("long", 5_000, session=1, at_s=0.0)
    stage.ask("longer", 6_000, session=2, at_s=0.5)
    stage.ask("cached", 5_000, session=3, at_s=1.0, cached=4_900)
    for at_s in (1.5, 1.6, 1.7):
        assert stage.release(at_s) == []  # now the length of each is known
    sent = []
    for at_s in (2.0, 3.0, 96.0, 97.0):
        stage.ask(f"at {at_s}", 100, at_s=at_s)
        stage.num_waiting[A] = 2
        sent += stage.release(at_s)
        stage.num_waiting[A] = 1
        sent += stage.release(at_s)

    assert sent == ["cached", "at 2.0", "long", "longer"]


def test_turns_of_conversations_with_room_go_nearly_in_order_of_arrival() -> None:
    """A prompt goes before one that came earlier by less than twice what it takes longer."""
    stage = Stage()
    for session in range(3):
        stage.lives(session, A, 1_000)
    stage.num_waiting[A] = 2
    stage.ask("long", 2_000, session=0, cached=1_000, at_s=0.0)
    stage.ask("short", 1_100, session=1, cached=1_000, at_s=1.7)
    stage.ask("late", 1_100, session=2, cached=1_000, at_s=1.9)
    for at_s in (2.0, 2.1, 2.2):
        assert stage.release(at_s) == []

    assert stage.release_each_s(3, 6) == ["short", "long", "late"]


def test_prompts_of_one_length_go_in_order_of_arrival() -> None:
    """Also if they were moved from another replica's line."""
    stage = Stage()
    for number, to in enumerate((A, B, A)):
        stage.num_waiting = {A: 2, B: 2}
        stage.ask(f"n{number}", 100, at_s=number / 10, to=to)
        stage.release(number / 10)
    stage.wants |= {"n0": B, "n2": B}
    for at_s in (1.0, 1.1, 1.2):
        stage.release(at_s)

    assert stage.release_each_s(2, 5) == ["n0", "n1", "n2"]


def test_prompts_that_wait_for_room_do_not_hold_up_conversations_that_go_on() -> None:
    stage = Stage()
    stage.lives(1, A, 8_900)
    for number in range(30):
        stage.ask(f"held {number}", 200, session=100 + number)
    stage.num_waiting[A] = 2
    assert stage.release(0.0) == []
    stage.num_waiting[A] = 1
    stage.ask("goes on", 9_200, session=1, cached=8_900, at_s=1.0)

    assert stage.release(1.0) == ["goes on"]


# -- classes, priorities, callers ------------------------------------------------------------


def test_batch_goes_first_after_twice_the_maximum_wait() -> None:
    stage = Stage(max_wait_s=5.0)
    stage.num_waiting[A] = 2
    stage.ask("batch", 5_000, batch=True)
    assert stage.release(0.0) == []
    sent = []
    for second in range(1, 11):
        stage.ask(f"i{second}", 100, at_s=second - 0.5)
        sent += stage.release_each_s(second, second + 1)

    assert sent == [*[f"i{second}" for second in range(1, 10)], "batch"]


def test_interactive_requests_need_no_room_of_batch_conversations() -> None:
    """A batch conversation gives up its room if contexts exceed the cache, even an earlier one."""
    stage = Stage(fill=1.0)
    stage.lives(1, A, 8_000, batch=True)
    stage.ask("batch", 5_000, session=2, batch=True)
    stage.ask("interactive", 5_000, session=3)
    assert stage.release(0.1) == ["interactive"]
    stage.sets.end(3, 5_000, 0.1)

    stage.ask("home", 8_100, session=1, cached=8_000, batch=True, at_s=0.2)
    assert stage.release(0.2) == ["batch"]
    assert stage.sets.home(1) is None


def test_prompts_that_wait_for_room_do_not_hold_up_lower_ones_at_another_replica() -> None:
    stage = Stage()
    stage.lives(1, A, 9_000)
    for number in range(100):
        stage.ask(f"high{number}", 2_000, session=100 + number, priority=1)
    stage.ask("low", 100, to=B)
    stage.ask("batch", 100, to=B, batch=True)

    assert stage.release(0.1) == ["low", "batch"]


def test_a_higher_priority_goes_first_within_its_class() -> None:
    """Shares of callers do not change that, the maximum wait does."""
    stage = Stage(max_wait_s=30.0)
    stage.ask("batch", 100, batch=True, priority=5)
    stage.ask("low", 100, caller="low", priority=-1)
    stage.ask("plain", 100)
    for number in range(3):
        stage.ask(f"high{number}", 5_000, caller="high", priority=5, at_s=0.1)
    stage.ask("later", 6_000, caller="high", priority=5, at_s=28.0)
    sent = stage.release_each_s(1, 5) + stage.release_each_s(29, 32)

    assert sent == ["high0", "high1", "high2", "later", "low", "plain", "batch"]


def test_a_full_queue_refuses_the_lowest_request_first() -> None:
    """Lowest class, lowest priority, longest prompt; none of the same class and priority."""
    stage = Stage()
    stage.num_waiting = {A: 2, B: 2}
    stage.ask("high", 9_000, priority=2)
    stage.ask("short", 100)
    stage.ask("long", 5_000, to=B)
    stage.ask("batch", 100, batch=True, priority=2)
    for at_s in (0.1, 0.2, 0.3):
        stage.release(at_s)
    refused = []
    while (displaced := stage.queue.displaced(is_batch=False, priority=2)) is not None:
        refused.append(displaced.item)
        stage.queue.remove(displaced, 0.5)

    assert refused == ["batch", "long", "short"]
    assert stage.queue.displaced(is_batch=False, priority=3) is not None
    assert stage.queue.displaced(is_batch=True, priority=9) is None


@pytest.mark.parametrize("num_many", [20, 200])
def test_a_caller_with_many_requests_takes_turns_with_one_that_has_few(
    num_many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "QUANTUM_MS", 2_000.0)
    stage = Stage()
    stage.ask("low", 1_000, caller="low", priority=-1)  # it has no turn
    for number in range(num_many):
        stage.ask(f"many{number}", 1_000, caller="many")
    stage.release_each_s(0, 5)
    for number in range(3):
        stage.ask(f"few{number}", 1_000, caller="few", at_s=5.0)
    after = stage.release_each_s(6, 12)

    assert len(after) == 6
    assert sum(name.startswith("few") for name in after) == 3


def test_shares_go_by_weight_and_cached_tokens_are_free() -> None:
    stage = Stage()
    for number in range(60):
        stage.ask(f"heavy{number}", 1_000, caller="heavy", weight=2.0)
        stage.ask(f"light{number}", 5_000, cached=4_000, caller="light")
    sent = stage.release_each_s(0, 45)

    assert len(sent) == 45
    assert 27 <= sum(name.startswith("heavy") for name in sent) <= 33


def test_a_spent_caller_uses_a_replica_that_no_other_caller_wants() -> None:
    stage = Stage()
    stage.num_waiting[A] = 2
    stage.ask("other", 1_000, caller="other")
    for number in range(5):
        stage.ask(f"{number}", 6_000, caller="one", to=B)
    for second in range(5):
        stage.num_waiting[B] = 1
        stage.release(float(second))

    assert sorted(stage.sent) == ["0", "1", "2", "3", "4"]


# -- deadlines and inter-token latency -------------------------------------------------------


def test_a_deadline_is_compared_with_all_work_that_goes_first() -> None:
    """That is the replica's queue, shorter and earlier requests for it, and the prompt itself."""
    stage = Stage()
    stage.num_waiting[A] = 2
    stage.expect("elsewhere", 4_000, 100.0, to=B)
    stage.expect("batch", 4_000, 100.0, batch=True)
    spare_ms = {
        name: stage.expect(name, num_tokens, 10.0, at_s=at_s).spare_ms
        for name, num_tokens, at_s in (
            ("first", 1_000, 0.0), ("second", 1_000, 0.1), ("long", 4_000, 0.1), ("short", 100, 0.2)
        )
    }  # fmt: skip

    assert spare_ms == {
        "first": pytest.approx(10_000 - READY_MS - 1_000),
        "second": pytest.approx(10_000 - READY_MS - 2_000),
        "long": pytest.approx(10_000 - READY_MS - 6_000),
        "short": pytest.approx(10_000 - READY_MS - 100),
    }


def test_a_request_is_refused_when_its_deadline_cannot_be_met_any_more() -> None:
    """Nothing has to be placed for that, and it is never sent late."""
    stage = Stage()
    stage.num_waiting[A] = 2
    assert stage.expect("late", 1_000, 1.2).spare_ms < 0.0
    stage.expect("waits", 1_000, 6.0, to=B)
    stage.expect("slow", 1_000, 9.0)
    assert stage.release(0.1) == ["waits"]
    assert stage.release(0.3) == []
    assert stage.refused == [("late", "deadline")]

    stage.queue_ms[A], stage.num_waiting[A] = 5_000.0, 0
    assert stage.release(4.0) == []
    assert stage.refused[1:] == [("slow", "deadline")]
    assert len(stage.queue) == 0


def test_an_idle_replica_takes_a_request_that_is_predicted_to_be_late() -> None:
    """The prediction can be wrong, and would stay so if nothing were ever sent."""
    stage = Stage()
    stage.num_requests[A] = 0
    stage.queue_ms[A] = 0.0

    assert stage.expect("slow", 5_000, 1.0).spare_ms == inf
    stage.ask("at once", 5_000, deadline_s=1.0)
    assert sorted(stage.release()) == ["at once", "slow"]


def test_a_request_waits_while_answers_are_slow_and_is_refused_in_the_end() -> None:
    """A replica whose latency is not known takes it."""
    stage = Stage(tbt_ms=50.0, max_wait_s=10.0)
    stage.tbt = {A: 50.1, B: 50.0}
    stage.ask("slow", 100)
    stage.ask("fast", 100, to=B)
    assert stage.release() == ["fast"]
    stage.tbt[A] = 49.0
    assert stage.release(1.0) == ["slow"]
    stage.tbt[A] = None
    stage.ask("not known", 100, at_s=1.0)
    assert stage.release(1.0) == ["not known"]

    stage.tbt[A], stage.num_waiting[A] = 60.0, 0
    stage.ask("stays slow", 100, at_s=2.0)
    assert stage.release(11.4) == []
    assert stage.refused == []
    assert stage.release(11.5) == []
    assert stage.refused == [("stays slow", "tbt")]


def test_the_replica_that_answers_decides_whether_answers_are_slow() -> None:
    """Another one may compute the prompt."""
    stage = Stage(tbt_ms=50.0)
    stage.tbt = {A: 10.0, B: 60.0}
    stage.ask("apart", 100).answers_at = B
    assert stage.release() == []

    stage.tbt[B] = 40.0
    assert stage.release() == ["apart"]


# -- a release as a whole --------------------------------------------------------------------


def test_a_release_goes_on_where_its_time_was_over() -> None:
    stage = Stage()
    stage.num_waiting[A] = -2
    for number in range(5):
        stage.ask(f"a{number}", 100)

    parts: list[list[str]] = []
    while not parts or not stage.is_done:
        parts.append(stage.release(at_most=2))
    assert parts == [["a0", "a1"], ["a2", "a3"], []]
    assert len(stage.queue) == 1


def test_a_request_whose_client_left_is_not_sent() -> None:
    stage = Stage()
    left = stage.ask("left", 100)
    stage.queue.remove(left, 0.0)
    stage.queue.remove(left, 0.0)
    stage.ask("cannot be placed", 100)
    del stage.wants["cannot be placed"]

    assert stage.release() == []
    assert len(stage.queue) == 0


@pytest.mark.parametrize("cause", ["no room", "all moved to a full replica"])
def test_a_release_places_few_requests_however_many_wait(cause: str) -> None:
    stage = Stage()
    stage.lives(1, A, 9_000)
    for number in range(500):
        stage.ask(f"n{number}", 2_000, session=100 + number)
    if cause != "no room":
        stage.num_waiting = {A: 2, B: 2}
        for _ in range(500):
            stage.release(0.0)
        stage.wants = dict.fromkeys(stage.wants, B)
    stage.num_choices = 0

    assert stage.release(0.1) == []
    assert stage.num_choices < 20


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "num_tokens": st.integers(1, 9_000),
            "to": st.sampled_from([A, B]),
            "batch": st.booleans(),
            "caller": st.sampled_from("abc"),
            "priority": st.sampled_from([-1, 0, 0, 7]),
            "deadline_s": st.none() | st.floats(0.001, 30.0),
        }
    ),
    min_size=1,
    max_size=100,
)


@settings(deadline=None, max_examples=100)
@given(REQUESTS)
def test_each_request_goes_in_time_or_is_refused(asks: list[dict[str, Any]]) -> None:
    """Requests without a deadline all go, and batch behind interactive ones of each replica."""
    stage = Stage()
    stage.capacity = None
    waiting = {str(number): stage.ask(str(number), **ask) for number, ask in enumerate(asks)}
    now_s = 0.0
    sent: dict[str, float] = {}
    while stage.queue:
        stage.num_waiting = {A: 1, B: 1}
        sent |= dict.fromkeys(stage.release(now_s), now_s)
        now_s += 1.0

    refused = [name for name, _ in stage.refused]
    assert sorted([*sent, *refused]) == sorted(waiting)
    assert all(waiting[name].deadline_s is not None for name in refused)
    for name, at_s in sent.items():
        deadline_s = waiting[name].deadline_s
        assert deadline_s is None or at_s + waiting[name].num_tokens / 1e3 <= deadline_s + 1e-6
    for candidate in (A, B):
        there = [waiting[name].is_batch for name in sent if stage.wants[name] == candidate]
        assert there == sorted(there)
    assert stage.queue.num_batch == 0


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (ANYWHERE, ["a", "b"]),
        (Where(home=B), ["b"]),
        (Where(home=CandidateId("gone")), ["a", "b"]),
        (Where(full=frozenset([A])), ["b"]),
        (Where(full=frozenset([A, B])), ["a", "b"]),
    ],
    ids=["anywhere", "at home", "its home is gone", "where there is room", "all are full"],
)
def test_a_policy_chooses_among_the_candidates_with_room(where: Where, expected: list[str]) -> None:
    candidates = [
        each
        for name in ("a", "b")
        for each in candidates_of(Replica(name=name, url=f"http://{name}"))
    ]
    assert [each.id for each in with_room(candidates, where)] == expected
