from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from policies import CandidateId, CostModel, ReplicaView
from policies.cost import candidate_costs
from policies.view import CandidateCost, RequestView, Snapshot
from router.replicas.conversations import Conversations
from router.replicas.ledger import NOTHING, InFront
from router.scheduling.queue import Limit, Outlook, Queue
from router.scheduling.waiting import QueueRules, Waiting

A, B = CandidateId("a"), CandidateId("b")
COST = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
CAPACITY = 10_000


class Chosen(Struct):
    """Where a request would go."""

    view: ReplicaView
    num_tokens: int = 1
    num_pooled_tokens: int | None = None

    def costs(self) -> tuple[CandidateCost, ...]:
        return candidate_costs(
            Snapshot(now_s=0.0, number=0, seed=0, replicas=(self.view,),
                     request=RequestView(num_tokens=self.num_tokens))
        )  # fmt: skip


class Stage:
    """A queue before two candidates; requests are names, and go where `wants` says."""

    def __init__(self, **rules: Any) -> None:
        self.sets = Conversations()
        self.num_waiting = {A: 0, B: 0}
        self.lost = {A: 0, B: 0}  # of those that wait: their first tokens are not to come
        self.pace_ms = {A: 0.0, B: 0.0}  # what waits takes, by the last first tokens
        self.idle_ms = {A: 0.0, B: 0.0}  # saved up
        self.wants: dict[str, CandidateId] = {}
        self.went_to: dict[str, CandidateId] = {}
        self.bears_ms: dict[str, float] = {}  # in front of it; with more it wants to go elsewhere
        self.cached: dict[str, int] = {}
        self.kept: dict[str, int] = {}  # in CPU memory
        self.pooled: dict[str, int] = {}
        self.sent: list[str] = []
        self.is_done = True  # the last release, with all that could be sent
        self.refused: list[str] = []
        self.queue_ms = {A: 0.0, B: 0.0}
        self.num_requests = {A: 1, B: 1}
        self.tbt: dict[CandidateId, float | None] = {A: None, B: None}
        self.ends = 0.0  # answers that end in a second
        self.limits: list[str] = []  # that those refused would have missed
        self.why: list[str] = []
        self.cost = COST
        self.num_choices = 0
        self.capacity: int | None = CAPACITY
        self.num_free = {A: CAPACITY, B: CAPACITY}  # tokens that no request has in use
        self.queue: Queue[Chosen] = Queue(
            QueueRules(**{"ready_ms": 0.0, **rules}),
            self.sets,
            self,
            lambda waiting, choice: waiting.num_tokens <= self.num_free[choice.view.id],
        )

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        return self.capacity

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        return self.num_waiting[candidate] - self.lost[candidate]

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        return self.pace_ms[candidate]

    def has_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> bool:
        return self.idle_ms[candidate] >= price_ms

    def spend_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> None:
        self.idle_ms[candidate] -= price_ms

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        return self.tbt[candidate]

    def ends_per_s(self, candidate: CandidateId) -> float:
        return self.ends

    def ask(self, name: str, num_tokens: int, *, session: int | None = None, at_s: float = 0.0,
            to: CandidateId = A, cached: int = 0, batch: bool = False, tenant: str = "",
            weight: float = 1.0, priority: int = 0,
            deadline_s: float | None = None,
            rules: QueueRules | None = None) -> Waiting:  # fmt: skip
        self.wants[name] = to
        self.cached[name] = cached
        waiting = Waiting(name, session, num_tokens, at_s, is_batch=batch, tenant=tenant,
                          weight=weight, priority=priority,
                          deadline_s=deadline_s, rules=rules)  # fmt: skip
        self.queue.add(waiting)
        return waiting

    def expect(self, name: str, num_tokens: int, within_s: float, *, at_s: float = 0.0,
               **kwargs: Any) -> float | None:  # fmt: skip
        """Let a request come as routers do; return by how many ms it keeps its deadline."""
        outlook = self.outlook(name, num_tokens, at_s=at_s, deadline_s=at_s + within_s, **kwargs)
        return outlook.spare_ms if outlook is not None else None

    def outlook(self, name: str, num_tokens: int, *, at_s: float = 0.0,
                **kwargs: Any) -> Outlook | None:  # fmt: skip
        """Let a request come as routers do; return what is predicted of it."""
        waiting = self.ask(name, num_tokens, at_s=at_s, **kwargs)
        choice = self._choose(waiting)
        assert choice is not None
        return self.queue.expect(waiting, choice, at_s)

    def release(self, now_s: float = 0.0, *, at_most: int = 1_000) -> list[str]:
        """Release, and return who was sent; with time for `at_most`."""
        before = len(self.sent)
        self.is_done = self.queue.release(
            now_s,
            self._choose,
            lambda waiting, choice, why: self._send(waiting, choice.view.id, why, now_s),
            self._refuse,
            lambda: len(self.sent) - before < at_most,
        )
        return self.sent[before:]

    def lives(self, session: int, candidate: CandidateId, num_tokens: int, at_s: float) -> None:
        """Let a conversation have had two turns."""
        for _ in range(2):
            self.sets.begin(session, candidate, num_tokens, 0, at_s)
            self.sets.end(session, at_s)

    def _choose(self, waiting: Waiting, in_front_ms: InFront = NOTHING) -> Chosen | None:
        self.num_choices += 1
        to = self.wants.get(waiting.item)
        if to is None:
            return None
        if in_front_ms.get(to, 0.0) > self.bears_ms.get(waiting.item, inf):
            to = A if to == B else B
        view = ReplicaView(id=to, num_gpu_tokens=self.cached[waiting.item], cost=self.cost,
                                  num_cpu_tokens=max(self.cached[waiting.item],
                                                     self.kept.get(waiting.item, 0)),
                                  num_requests=self.num_requests[to],
                                  queue_ms=self.queue_ms[to],
                                  num_waiting=self.num_waiting[to])  # fmt: skip
        return Chosen(view, waiting.num_tokens, self.pooled.get(waiting.item))

    def _refuse(self, waiting: Waiting, limit: Limit, excess_ms: float) -> None:
        assert excess_ms > 0.0
        self.refused.append(waiting.item)
        self.limits.append(limit)

    def _send(self, waiting: Waiting, to: CandidateId, why: str, now_s: float) -> None:
        self.why.append(why)
        self.went_to[waiting.item] = to
        self.sent.append(waiting.item)
        self.num_waiting[to] += 1
        if waiting.session is not None:
            num_cached = self.cached[waiting.item]
            self.sets.begin(waiting.session, to, waiting.num_tokens, num_cached, now_s)


def test_a_release_goes_on_where_its_time_was_over() -> None:
    """The same go, in the same order, in as many parts as it takes."""
    stage = Stage(window=3)
    for number in range(5):
        stage.ask(f"a{number}", 100)

    parts = []
    while not parts or not stage.is_done:
        parts.append(stage.release(at_most=2))
    assert parts == [["a0", "a1"], ["a2", "a3"], []]
    assert len(stage.queue) == 1


def test_an_engine_has_one_ready_beside_the_one_it_computes() -> None:
    """What does not fit the window waits; a full candidate stops no other."""
    stage = Stage()
    for name in ("a1", "a2", "a3"):
        stage.ask(name, 100)
    stage.ask("b1", 100, to=B)

    assert stage.release() == ["a1", "a2", "b1"]
    stage.num_waiting[A] = 1
    assert stage.release() == ["a3"]
    assert len(stage.queue) == 0


def line_at_a(num_requests: int, bears_ms: float) -> Stage:
    """Have requests of 100 ms wait for a full candidate, which bear so much in front of them."""
    stage = Stage()
    stage.num_waiting = {A: 2, B: 2}
    for number in range(num_requests):
        stage.ask(f"{number}", 100)
        stage.bears_ms[f"{number}"] = bears_ms
    assert stage.release() == []
    return stage


def test_the_end_of_a_long_line_goes_elsewhere() -> None:
    """Where its policy would send it, what is in front of it counted; those in front stay."""
    stage = line_at_a(6, bears_ms=250.0)
    stage.num_waiting[B] = -3  # it has room for all

    assert stage.release() == ["5", "4", "3"]
    assert {stage.went_to[name] for name in stage.sent} == {B}
    assert stage.release() == []
    stage.num_waiting[A] = 1
    assert stage.release() == ["0"]
    assert stage.went_to["0"] == A


def test_no_line_moves_to_where_no_window_is_open() -> None:
    """It would only wait there; and few are asked in vain, however many wait."""
    stage = line_at_a(60, bears_ms=0.0)
    for _ in range(8):
        stage.release()  # until each has been looked at
    num_before = stage.num_choices

    assert stage.release() == []
    assert stage.num_choices - num_before <= 3
    stage.num_waiting[B] = 1
    assert stage.release() == ["59"]


def test_who_goes_elsewhere_has_to_fit_there_and_to_be_in_time() -> None:
    """The line's end is judged as any request, and waits on where it may not go."""
    stage = line_at_a(2, bears_ms=0.0)
    stage.num_waiting[B], stage.queue_ms[B], stage.num_free[B] = 0, 99.0, 0  # no blocks

    assert stage.release() == []
    stage.num_free[B] = CAPACITY
    assert stage.release() == ["1"]

    stage = line_at_a(1, bears_ms=inf)
    stage.ask("late", 100, at_s=0.0, deadline_s=0.05)
    stage.bears_ms["late"] = 0.0
    stage.num_waiting[B] = 0
    assert stage.release(0.0) == []
    stage.wants.pop("late")  # its client leaves
    stage.release(0.0)
    assert len(stage.queue) == 1


def test_who_goes_elsewhere_takes_no_others_turn() -> None:
    """Where some wait for room it stays, and where there is idle time alone: these come first."""
    stage = line_at_a(2, bears_ms=0.0)
    stage.lives(7, B, CAPACITY, 0.0)
    stage.ask("without room", 900, session=8, to=B)
    stage.num_waiting[B] = 0
    assert stage.release() == []
    stage.wants.pop("without room")  # its client leaves
    assert stage.release() == ["1"]

    stage = Stage()
    stage.num_waiting = {A: 2, B: 0}
    stage.lives(7, B, CAPACITY, 0.0)
    stage.idle_ms[B] = 1e9
    for session in (8, 9):
        stage.ask(f"{session}", 900, session=session)
        stage.bears_ms[f"{session}"] = 0.0
    assert stage.release() == []


@pytest.mark.parametrize(("says", "enough_ms"), [("queue_ms", 200.0), ("pace_ms", 400.0)])
def test_more_are_ready_as_long_as_they_are_little_work(says: str, enough_ms: float) -> None:
    """However many; and one that is much work is ready alone.

    By the learned cost, or by half of what it takes at the engine's pace: that cost may be nothing,
    and the pace of short prompts has an engine's steps in it.
    """
    stage = Stage(window=1, ready_ms=200.0)
    work_ms = getattr(stage, says)
    stage.num_waiting[A], work_ms[A] = 7, enough_ms - 1.0
    stage.ask("more", 100)
    assert stage.release() == ["more"]
    work_ms[A] = enough_ms
    stage.ask("too much", 100)
    assert stage.release() == []
    stage.num_waiting[A], work_ms[A] = 1, 9_000.0
    assert stage.release() == ["too much"]


def test_short_ones_go_first_and_long_ones_in_the_end() -> None:
    """By what each has to compute at this moment; after `max_wait_s` by who came first."""
    stage = Stage(window=0, max_wait_s=100.0)
    stage.ask("long", 5_000, at_s=0.0)
    stage.ask("longer", 6_000, at_s=0.5)
    stage.ask("cached", 5_000, at_s=1.0, cached=4_900)
    stage.num_waiting[A] = 1
    assert stage.release(1.5) == []  # now it is known how long each takes
    sent = []
    for at_s in (2.0, 3.0, 101.0, 102.0):
        stage.ask(f"at {at_s}", 100, at_s=at_s)
        sent += stage.release(at_s)
        stage.num_waiting[A] = 0
        sent += stage.release(at_s)

    assert sent == ["cached", "at 2.0", "long", "longer"]


def test_what_an_engine_has_no_blocks_for_waits_and_those_behind_it() -> None:
    """It would wait there as well; what takes longer would keep it waiting."""
    stage = Stage(max_wait_s=60.0)
    stage.num_free[A] = 900
    stage.queue_ms[A] = 60.0
    stage.ask("large", 1_000, cached=900)
    stage.ask("behind", 800, at_s=0.998)
    stage.ask("elsewhere", 1_000, to=B)

    assert stage.release(1.0) == ["elsewhere"]
    stage.num_free[A] = 1_000
    assert stage.release(1.005)[0] == "large"


@pytest.mark.parametrize(
    ("num_requests", "queue_ms", "waited_s", "pooled", "capacity"),
    [
        (0, 99.0, 1.0, {}, 9),
        (1, 59.0, 1.0, {}, 9),
        (1, 99.0, 60.0, {}, 9),
        (1, 99.0, 1.0, {"large": 0}, 9),
        (1, 99.0, 1.0, {}, None),
    ],
    ids=["nothing runs", "it will idle", "after long", "with a pool", "of a cache of unknown size"],
)
def test_it_goes_without_blocks(
    num_requests: int,
    queue_ms: float,
    waited_s: float,
    pooled: dict[str, int],
    capacity: int | None,
) -> None:
    """What is believed to be in use may be wrong, and a pool gives back what is evicted."""
    stage = Stage(max_wait_s=60.0)
    stage.pooled |= pooled
    stage.capacity = capacity
    stage.num_free[A] = 0
    stage.num_requests[A] = num_requests
    stage.queue_ms[A] = queue_ms
    stage.ask("large", 1_000)

    assert stage.release(waited_s) == ["large"]


def test_a_session_that_does_not_fit_waits_for_room() -> None:
    """Those that live there go on; it goes when one of them is over."""
    stage = Stage(max_wait_s=1e6)
    stage.lives(1, A, 5_000, 0.0)
    stage.lives(2, A, 3_000, 0.0)
    stage.ask("new", 2_000, session=3)
    stage.ask("old", 5_100, session=1, cached=5_000)

    assert stage.release(0.1) == ["old"]
    stage.num_waiting[A] = 0
    assert stage.release(stage.sets.patience_s - 0.1) == []
    assert stage.release(stage.sets.patience_s + 0.1) == ["new"]


def test_of_those_that_have_outgrown_a_cache_the_last_that_came_waits() -> None:
    """So the first ones get done."""
    stage = Stage()
    stage.lives(1, A, 5_000, 0.0)
    stage.lives(2, A, 5_000, 0.1)
    stage.ask("second", 5_100, session=2, at_s=0.2, cached=5_000)
    stage.ask("first", 5_100, session=1, at_s=0.2, cached=5_000)

    assert stage.release(0.2) == ["first"]


@pytest.mark.parametrize(("share", "goes"), [(0.999, False), (1.001, True)])
def test_idle_time_does_instead_of_room(share: float, goes: bool) -> None:
    """Computing it takes 2 s; whoever lives there, of whom 0.9 would fit, comes back in a cycle."""
    stage = Stage(patience=0.5)
    stage.lives(1, A, 10_000, 0.0)
    stage.ask("new", 2_000, session=2)
    scarcity = 2.0 * 0.9 / stage.sets.cycle_s
    price_ms = 0.5 * 2_000.0 * scarcity**3
    stage.idle_ms[A] = share * price_ms

    assert bool(stage.release(0.1)) is goes
    assert stage.why == ["idle"] * goes
    assert stage.idle_ms[A] == pytest.approx((share - goes) * price_ms)


@pytest.mark.parametrize("num_sessions", [2, 4])
def test_the_more_an_engine_would_have_to_compute_anew_the_more_idle_time_it_takes(
    num_sessions: int,
) -> None:
    """Twice the conversations that come back, or in half the time: eight times the price."""
    stage = Stage()
    for session in range(num_sessions):
        stage.lives(session, A, 9_000 // num_sessions, 0.0)
    stage.ask("new", 2_000, session=10)
    stage.release(0.0)  # for want of idle time it does not go
    scarcity = 2.0 * num_sessions / stage.sets.cycle_s
    stage.idle_ms[A] = 0.999 * 0.5 * 2_000.0 * scarcity**3

    assert not stage.release(0.1)
    stage.idle_ms[A] /= 0.998
    assert stage.release(0.2) == ["new"]


def test_the_more_wait_the_more_idle_time_a_prompt_takes() -> None:
    """Of those for the same engine: where many wait there is too little for all of them."""
    stage = Stage(window=99, patience=0.5)
    stage.lives(1, A, 9_000, 0.0)
    stage.lives(2, B, 9_000, 0.0)
    for number in range(4):
        stage.ask(f"new{number}", 2_000, session=10 + number)
    stage.ask("alone", 2_000, session=20, to=B)
    stage.release(0.1)  # none goes; now it is known where each would
    price_ms = 0.5 * 2_000.0 * (2.0 / stage.sets.cycle_s) ** 3  # of one alone
    stage.idle_ms = {A: 3.999 * price_ms, B: 1.001 * price_ms}

    assert stage.release(0.2) == ["alone"]
    stage.idle_ms[A] = 4.001 * price_ms
    assert len(stage.release(0.3)) == 1
    assert stage.idle_ms == pytest.approx({A: 0.001 * price_ms, B: 0.001 * price_ms})


@pytest.mark.parametrize("batch", [False, True])
def test_batch_requests_that_wait_cost_an_interactive_prompt_no_idle_time(batch: bool) -> None:
    """They go behind it. Where the others are interactive, too, it takes four times as much."""
    stage = Stage(window=99, patience=0.5)
    stage.lives(1, A, 9_000, 0.0)
    for number in range(3):
        stage.ask(f"other{number}", 2_000, session=10 + number, batch=batch)
    stage.ask("asked", 2_000, session=20)
    stage.release(0.1)  # none goes; now it is known where each would
    stage.idle_ms[A] = 1.001 * 0.5 * 2_000.0 * (2.0 / stage.sets.cycle_s) ** 3  # of one alone

    assert stage.release(0.2) == ["asked"] * batch


def test_a_lost_request_and_direct_clients_do_not_close_the_window() -> None:
    """What routers sent, and its first token may come, is what counts."""
    stage = Stage()
    stage.num_waiting[A] = 2
    stage.ask("a", 100)
    assert stage.release() == []
    stage.lost[A] = 1
    assert stage.release() == ["a"]


def test_what_is_asked_once_takes_no_room() -> None:
    """Where conversations do not go on, none waits for the end of others."""
    stage = Stage()
    for number in range(200):
        stage.ask(str(number), 4_000, session=number, at_s=float(number))
        stage.num_waiting[A] = 0
        for name in stage.release(float(number)):
            stage.sets.end(int(name), float(number))
    assert len(stage.queue) == 0
    assert stage.why[-50:] == ["room"] * 50


def test_a_cache_of_one_is_never_too_small() -> None:
    """A session alone goes, whatever it takes; so does one without an id."""
    stage = Stage()
    stage.ask("huge", 9_900, session=1)
    assert stage.release() == ["huge"]

    stage = Stage()
    stage.lives(1, A, 9_000, 0.0)
    stage.ask("nameless", 9_900)
    assert stage.release() == ["nameless"]


def test_those_that_wait_for_room_do_not_hold_up_who_goes_on() -> None:
    """However short they are, and though nobody knows yet where it would go."""
    stage = Stage(window=99)
    stage.lives(1, A, 8_900, 0.0)
    for number in range(30):
        stage.ask(f"held {number}", 200, session=100 + number)
    assert stage.release(0.0) == []
    stage.ask("goes on", 9_200, session=1, cached=8_900, at_s=1.0)

    assert stage.release(1.0) == ["goes on"]


def test_nobody_waits_for_room_for_ever() -> None:
    """After `max_wait_s` it goes, before all others; the window holds for it, too."""
    stage = Stage(max_wait_s=10.0, window=0)
    stage.lives(1, A, 9_000, 0.0)
    stage.ask("new", 2_000, session=2)
    for at_s in (1.0, 3.0, 5.0, 7.0, 9.0):
        stage.lives(1, A, 9_000, at_s)
        assert stage.release(at_s) == []
    stage.ask("old", 9_001, session=1, at_s=9.5, cached=9_000)
    stage.num_waiting[A] = 1
    assert stage.release(10.0) == []
    stage.num_waiting[A] = 0
    assert stage.release(10.0) == ["new"]
    assert stage.why == ["waited_out"]


def test_who_has_left_is_not_sent() -> None:
    """A request whose client is gone costs nothing, nor one that cannot be placed."""
    stage = Stage()
    stage.queue.remove(stage.ask("left", 100))
    stage.ask("unplaced", 100)
    del stage.wants["unplaced"]

    assert stage.release() == []
    assert len(stage.queue) == 0


def test_a_long_queue_is_not_placed_whole() -> None:
    """A release places a few in vain, however many wait."""
    stage = Stage()
    stage.lives(1, A, 9_000, 0.0)
    for number in range(1_000):
        stage.ask(f"n{number}", 2_000, session=100 + number)

    assert stage.release(0.1) == []
    assert stage.num_choices < 20


def test_a_release_is_bounded_where_all_want_to_go_elsewhere() -> None:
    """Their candidate is gone, and the other one is full: they are not placed whole, either."""
    stage = Stage()
    stage.num_waiting = {A: 2, B: 2}
    for number in range(200):
        stage.ask(f"n{number}", 100, at_s=number / 10)
        stage.release(number / 10)
    for number in range(200):
        stage.wants[f"n{number}"] = B
    stage.num_choices = 0

    assert stage.release(30.0) == []
    assert stage.num_choices < 20


def test_who_goes_elsewhere_now_is_among_those_who_want_to_go_there() -> None:
    """In the order of arrival among those that take as long."""
    stage = Stage(window=0)
    stage.num_waiting = {A: 1, B: 1}
    for number, to in enumerate((A, B, A)):
        stage.ask(f"n{number}", 100, at_s=number / 10, to=to)
        stage.release(number / 10)
    for at_s in (1.0, 1.1, 1.2):
        stage.wants["n0"] = stage.wants["n2"] = B
        stage.release(at_s)
    sent = []
    for at_s in (2.0, 2.1, 2.2):
        stage.num_waiting[B] = 0
        sent += stage.release(at_s)

    assert sent == ["n0", "n1", "n2"]


def test_batch_goes_behind_interactive_ones() -> None:
    """However short it is, and wherever its session lives."""
    stage = Stage(window=0)
    stage.lives(1, A, 100, 0.0)
    stage.ask("batch", 110, session=1, cached=100, batch=True)
    stage.ask("first", 5_000, at_s=0.1)
    stage.ask("second", 5_000, at_s=0.2)
    sent = []
    for at_s in (1.0, 1.1, 1.2):
        stage.num_waiting[A] = 0
        sent += stage.release(at_s)

    assert sent == ["first", "second", "batch"]


def test_interactive_requests_need_no_room_of_batch_conversations() -> None:
    """And a batch conversation waits while interactive ones fill the cache, who came later."""
    stage = Stage(fill=1.0)
    for _ in range(2):
        stage.sets.begin(1, A, 8_000, 0, 0.0, is_batch=True)
        stage.sets.end(1, 0.0)
    stage.ask("batch", 5_000, session=2, batch=True)
    stage.ask("interactive", 5_000, session=3)
    assert stage.release(0.1) == ["interactive"]
    assert stage.why == ["room"]
    stage.sets.end(3, 0.1)
    stage.lives(4, A, 4_000, 0.1)

    stage.ask("home", 8_100, session=1, cached=8_000, batch=True, at_s=0.2)
    assert stage.release(0.2) == []
    stage.ask("interactive too", 5_100, session=3, cached=5_000, at_s=0.2)
    assert stage.release(0.2) == ["interactive too"]


def test_batch_does_not_starve() -> None:
    """After `batch_max_wait_s` it goes first of all."""
    stage = Stage(window=0, batch_max_wait_s=10.0)
    stage.num_waiting[A] = 1
    stage.ask("batch", 5_000, batch=True)
    assert stage.release(0.0) == []
    sent = []
    for second in range(1, 11):
        stage.ask(f"i{second}", 100, at_s=second - 0.5)
        stage.num_waiting[A] = 0
        sent += stage.release(float(second))

    assert sent == [f"i{second}" for second in range(1, 10)] + ["batch"]


def test_interactive_ones_that_wait_for_room_do_not_hold_up_batch() -> None:
    """Not even where there are many of them: compute at the other candidate is to be used."""
    stage = Stage()
    stage.lives(1, A, 9_000, 0.0)
    for number in range(20):
        stage.ask(f"i{number}", 2_000, session=100 + number)
    stage.ask("batch", 100, to=B, batch=True)

    assert stage.release(0.1) == ["batch"]


def test_of_batch_the_costliest_is_refused_first() -> None:
    """By uncached tokens; of those that take as long the last that came, and none interactive."""
    stage = Stage(window=0)
    stage.num_waiting = {A: 1, B: 1}
    assert stage.queue.refused_for(is_batch=False) is None
    stage.ask("interactive", 9_000)
    assert stage.queue.refused_for(is_batch=False) is None
    stage.ask("warm", 9_000, cached=8_900, batch=True)
    stage.ask("cold", 5_000, batch=True, to=B)
    stage.ask("cold too", 5_000, batch=True, to=B)
    for at_s in (0.1, 0.2, 0.3):
        stage.release(at_s)
    refused = []
    while (costliest := stage.queue.refused_for(is_batch=False)) is not None:
        assert stage.queue.refused_for(is_batch=True) is None
        refused.append(costliest.item)
        stage.queue.remove(costliest)

    assert refused == ["cold too", "cold", "warm"]
    assert (len(stage.queue), stage.queue.num_batch) == (1, 0)


def test_a_higher_priority_goes_first_within_its_class() -> None:
    """Whatever the others' shares are; batch stays behind, and none waits for ever."""
    stage = Stage(window=0, quantum_s=0.1, max_wait_s=30.0)
    stage.ask("batch", 100, batch=True, tenant="high", priority=5)
    stage.ask("low", 100, tenant="low", priority=-1)
    stage.ask("plain", 100)
    for number in range(3):
        stage.ask(f"high{number}", 5_000, tenant="high", priority=5, at_s=0.1)
    stage.ask("later", 6_000, tenant="high", priority=5, at_s=29.0)
    sent = []
    for at_s in (1.0, 2.0, 3.0, 4.0, 30.0, 31.0, 32.0):
        stage.num_waiting[A] = 0
        sent += stage.release(at_s)

    assert sent == ["high0", "high1", "high2", "later", "low", "plain", "batch"]


def test_tenants_of_one_priority_take_turns() -> None:
    """Also while one of a lower priority waits, which has no turn."""
    stage = Stage(window=0, quantum_s=1.0)
    stage.ask("low", 1_000, tenant="low", priority=-1)
    for number in range(6):
        stage.ask(f"a{number}", 1_000, tenant="a")
    for number in range(6):
        stage.ask(f"b{number}", 1_000, tenant="b")
    for second in range(6):
        stage.num_waiting[A] = 0
        stage.release(float(second))

    assert sum(name.startswith("a") for name in stage.sent) == 3
    assert "low" not in stage.sent


def test_high_ones_that_wait_for_room_do_not_hold_up_low_ones() -> None:
    """Compute at the other candidate is to be used."""
    stage = Stage()
    stage.lives(1, A, 9_000, 0.0)
    for number in range(100):
        stage.ask(f"high{number}", 2_000, session=100 + number, tenant="high", priority=1)
    stage.ask("low", 100, to=B)

    assert stage.release(0.1) == ["low"]


def test_arms_have_windows_of_their_own_for_what_is_ready_of_all() -> None:
    """One that waits by a shallow window does not hold up another arm's, which counts it."""
    wide = QueueRules(window=2, ready_ms=0.0)
    stage = Stage(window=0)
    stage.num_waiting[A] = 1
    stage.ask("shallow", 100)
    for number in range(3):
        stage.ask(f"wide{number}", 1_000, rules=wide)

    assert stage.release(0.1) == ["wide0", "wide1"]
    stage.num_waiting[A] = 0
    assert stage.release(0.2) == ["shallow", "wide2"]


def test_arms_have_room_of_their_own_in_caches_of_all() -> None:
    """More of the same cache may be filled by one arm's conversations."""
    stage = Stage()
    stage.lives(1, A, 8_000, 0.0)
    stage.ask("plain", 2_000, session=2)
    stage.ask("full", 2_000, session=3, rules=QueueRules(fill=1.1))

    assert stage.release(0.1) == ["full"]


@pytest.mark.parametrize(
    ("ms_per_token", "first"),
    [(0.1, "read"), (0.3, "cold")],
    ids=["read quickly", "read slowly"],
)
def test_the_order_counts_what_is_read_as_well(ms_per_token: float, first: str) -> None:
    """A long prompt that is read goes before a shorter one that is computed for longer."""
    stage = Stage(window=0)
    stage.cost = replace(COST, ms_per_fetch=0.0, ms_per_fetched_token=ms_per_token)
    stage.num_waiting[A] = 1
    stage.ask("cold", 2_000)
    stage.ask("read", 8_000, at_s=0.1)
    stage.pooled["read"] = 7_900
    for at_s in (0.2, 0.3):
        stage.release(at_s)
    stage.num_waiting[A] = 0

    assert stage.release(1.0) == [first]


@pytest.mark.parametrize(
    ("num_pooled", "ms_per_token", "share"),
    [(1_000, 0.0, 0.13), (1_000, 0.5, 0.56), (500, 0.0, 0.56), (1_000, 1.1, 1.0)],
)
def test_with_a_pool_a_prompt_without_room_costs_what_reading_does_over_computing(
    num_pooled: int, ms_per_token: float, share: float
) -> None:
    """As far as others found theirs there; after 40 of them 0.13 is still of what was before."""
    price_ms, computed_ms = [
        _idle_ms_without_room(_that_came_back(num_pooled=num, ms_per_token=ms_per_token))
        for num in (num_pooled, 0)
    ]

    assert price_ms / computed_ms == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(("num_kept", "share"), [(990, 0.37), (500, 1.0)])
def test_with_cpu_memory_that_keeps_what_falls_out_a_prompt_without_room_costs_less(
    num_kept: int, share: float
) -> None:
    """Half of each conversation that came back had fallen out; the engine had kept it, or not."""
    price_ms, computed_ms = [
        _idle_ms_without_room(_that_came_back(num_kept=num, cached=500)) for num in (num_kept, 0)
    ]

    assert price_ms / computed_ms == pytest.approx(share, rel=0.02)


def _that_came_back(
    *,
    num_pooled: int | None = None,
    num_kept: int = 0,
    cached: int = 0,
    ms_per_token: float = 0.0,
) -> Stage:
    """Let 40 conversations have a further turn, of which so much is in pool, CPU memory, cache."""
    stage = Stage(window=1_000)
    stage.cost = replace(
        COST, ms_per_fetched_token=ms_per_token, ms_per_fetch=0.0, ms_per_cpu_token=0.0
    )
    for number in range(40):
        name = f"back{number}"
        stage.lives(number, B, 1_000, 0.0)
        stage.kept[name] = num_kept
        if num_pooled is not None:
            stage.pooled[name] = num_pooled
        stage.ask(name, 1_000, session=number, to=B, cached=cached)
        stage.release(0.0)
        stage.sets.remove(B)
    return stage


def _idle_ms_without_room(stage: Stage) -> float:
    """Return how much idle time a new conversation takes that does not fit."""
    stage.lives(1_000, A, 9_000, 0.0)
    stage.idle_ms[A] = 1e9
    if stage.pooled:
        stage.pooled["new"] = 0
    stage.ask("new", 2_000, session=1_001)

    assert stage.release(0.1) == ["new"]
    assert stage.why[-1] == "idle"
    return 1e9 - stage.idle_ms[A]


def test_of_a_full_queue_the_lowest_priority_is_refused_first() -> None:
    """No request is refused for one of the same priority; batch goes before interactive ones."""
    stage = Stage(window=0)
    stage.num_waiting = {A: 1, B: 1}
    stage.ask("high", 9_000, tenant="high", priority=2)
    stage.ask("plain", 100)
    stage.ask("cold", 5_000, to=B)
    stage.ask("batch", 100, batch=True, tenant="high", priority=2)
    for at_s in (0.1, 0.2, 0.3):
        stage.release(at_s)
    refused = []
    while (displaced := stage.queue.refused_for(is_batch=False, priority=2)) is not None:
        refused.append(displaced.item)
        stage.queue.remove(displaced)

    assert refused == ["batch", "cold", "plain"]
    assert stage.queue.refused_for(is_batch=False, priority=3) is not None


_ASK = st.tuples(
    st.integers(1, 9_000),  # tokens
    st.sampled_from([A, B]),
    st.booleans(),  # batch
    st.none() | st.integers(1, 5),  # session
)


@settings(deadline=None, max_examples=60)
@given(st.lists(_ASK, min_size=1, max_size=100))
def test_all_go_in_the_end_and_batch_behind(
    asks: list[tuple[int, CandidateId, bool, int | None]],
) -> None:
    """Each once; until it has waited out, no batch while an interactive one could go there."""
    stage = Stage(window=0, patience=0.0, max_wait_s=1e6, batch_max_wait_s=1e6)
    batch = {f"{number}" for number, ask in enumerate(asks) if ask[2]}
    for number, (num_tokens, to, is_batch, session) in enumerate(asks):
        stage.ask(f"{number}", num_tokens, to=to, batch=is_batch, session=session)
    now_s = 0.0
    while stage.queue and now_s < 1_000:
        now_s += 1.0
        stage.num_waiting = {A: 0, B: 0}
        stage.release(now_s)

    assert sorted(stage.sent) == sorted(stage.wants)
    assert stage.queue.num_batch == 0
    for candidate in (A, B):
        there = [name in batch for name in stage.sent if stage.wants[name] == candidate]
        assert there == sorted(there)


@pytest.mark.parametrize("num_many", [20, 200])
def test_a_tenant_with_many_requests_does_not_starve_one_with_few(num_many: int) -> None:
    """From when the other comes they take turns, though all of its own came first."""
    stage = Stage(window=0, quantum_s=2.0)
    for number in range(num_many):
        stage.ask(f"many{number}", 1_000, tenant="many")
    for second in range(5):
        stage.num_waiting[A] = 0
        stage.release(float(second))
    for number in range(3):
        stage.ask(f"few{number}", 1_000, tenant="few", at_s=5.0)
    after = []
    for second in range(6, 12):
        stage.num_waiting[A] = 0
        after += stage.release(float(second))

    assert len(after) == 6
    assert sum(name.startswith("few") for name in after) == 3


def test_shares_are_by_weight_and_what_is_cached_is_free() -> None:
    """Twice the weight is twice the compute; a tenant's own cache costs it nothing."""
    stage = Stage(window=0, quantum_s=3.0)
    for number in range(60):
        stage.ask(f"heavy{number}", 1_000, tenant="heavy", weight=2.0)
        stage.ask(f"light{number}", 5_000, cached=4_000, tenant="light")
    for second in range(45):
        stage.num_waiting[A] = 0
        stage.release(float(second))

    num_heavy = sum(name.startswith("heavy") for name in stage.sent)
    assert len(stage.sent) == 45
    assert 29 <= num_heavy <= 33


def test_a_spent_tenant_takes_what_others_leave() -> None:
    """An engine that no other wants does not wait for a round."""
    stage = Stage(window=0, quantum_s=1.0)
    stage.num_waiting[A] = 1
    stage.ask("other", 1_000, tenant="other")
    for number in range(5):
        stage.ask(f"{number}", 1_000, tenant="one", to=B)
    for second in range(5):
        stage.num_waiting[B] = 0
        stage.release(float(second))

    assert sorted(stage.sent) == ["0", "1", "2", "3", "4"]


@given(
    st.lists(
        st.tuples(_ASK, st.sampled_from("abc"), st.sampled_from([-1, 0, 0, 7])),
        min_size=1,
        max_size=150,
    )
)
def test_whoever_asks_is_served(
    asks: list[tuple[tuple[int, CandidateId, bool, int | None], str, int]],
) -> None:
    """Each request goes once, whichever tenant it is of; nothing is left of any."""
    stage = Stage(window=0, patience=0.0, quantum_s=0.5)
    for number, ((num_tokens, to, is_batch, session), tenant, priority) in enumerate(asks):
        stage.ask(f"{number}", num_tokens, to=to, batch=is_batch, session=session, tenant=tenant,
                  priority=priority)  # fmt: skip
    now_s = 0.0
    while stage.queue and now_s < 1_000:
        now_s += 1.0
        stage.num_waiting = {A: 0, B: 0}
        before = len(stage.sent)
        stage.release(now_s)
        assert len(stage.sent) > before

    assert sorted(stage.sent) == sorted(stage.wants)
    assert stage.queue.num_batch == 0


def test_a_deadline_is_held_against_what_goes_first() -> None:
    """The engine's queue, those that wait and are shorter or came first, and its own work."""
    stage = Stage(window=0)
    stage.num_waiting[A], stage.queue_ms[A] = 1, 300.0
    assert stage.expect("first", 1_000, 10.0) == pytest.approx(10_000 - 1_300)
    spare_ms = stage.expect("second", 1_000, 10.0, at_s=0.1)
    long_ms = stage.expect("long", 4_000, 10.0, at_s=0.1)
    short_ms = stage.expect("short", 100, 10.0, at_s=0.2)

    assert spare_ms == pytest.approx(10_000 - 2_300, rel=0.05)
    assert long_ms == pytest.approx(10_000 - 6_300, rel=0.1)
    assert short_ms == pytest.approx(10_000 - 400, rel=0.2)


def test_what_waits_elsewhere_is_no_matter_nor_is_batch_for_interactive_ones() -> None:
    """But for batch all interactive ones are."""
    stage = Stage(window=0)
    stage.num_waiting = {A: 1, B: 1}
    stage.expect("batch", 4_000, 100.0, batch=True)
    stage.expect("elsewhere", 4_000, 100.0, to=B)

    assert stage.expect("here", 1_000, 10.0) == pytest.approx(9_000)
    behind_ms = stage.expect("more batch", 100, 10.0, batch=True)
    assert behind_ms == pytest.approx(10_000 - 1_000 - 100, rel=0.05)


def test_a_request_that_would_be_late_is_refused_as_soon_as_that_is_known() -> None:
    """When it comes; while it waits, when the engine turns out to be slower; never sent late."""
    stage = Stage(window=0)
    stage.num_waiting[A], stage.queue_ms[A] = 1, 3_000.0
    late = stage.expect("late", 1_000, 3.5)
    assert late == pytest.approx(-500.0)
    stage.expect("waits", 1_000, 6.0)
    stage.release(0.5)
    assert stage.refused == []
    stage.queue_ms[A] = 5_500.0
    stage.release(1.5)
    assert stage.refused == ["waits"]

    stage = Stage(window=0)
    stage.num_waiting[A] = 1
    stage.expect("slept through", 1_000, 2.0)
    stage.num_waiting[A] = 0
    stage.queue._checks.clear()
    assert stage.release(1.5) == []
    assert (stage.refused, len(stage.queue)) == (["slept through"], 0)


def test_an_engine_with_nothing_to_do_takes_what_is_predicted_to_be_late() -> None:
    """The prediction may be wrong, and would stay so if nothing were ever sent."""
    stage = Stage()
    stage.num_requests[A] = 0
    assert stage.expect("slow", 5_000, 1.0) is None
    assert stage.release() == ["slow"]


def test_waits_that_are_longer_than_predicted_are_learned_from() -> None:
    """Up to a bound, and for its class alone."""
    stage = Stage(window=0)
    for number in range(100):
        at_s = 100.0 * number
        stage.num_waiting[A] = 1
        stage.ask(f"a{number}", 1_000, at_s=at_s)
        stage.release(at_s)
        stage.expect(f"b{number}", 1_000, 50.0, at_s=at_s + 0.01)
        for after_s in (1.0, 3.0):
            stage.num_waiting[A] = 0
            stage.release(at_s + after_s)

    assert 2.0 < stage.queue._forecast.stretch(is_batch=False) <= 4.0
    assert stage.queue._forecast.stretch(is_batch=True) == 1.0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(_ASK, st.none() | st.floats(0.001, 30.0)), min_size=1, max_size=100))
def test_no_deadline_is_missed_in_the_queue(
    asks: list[tuple[tuple[int, CandidateId, bool, int | None], float | None]],
) -> None:
    """Each goes in time, or is refused; those without a deadline all go."""
    stage = Stage(window=0, patience=0.0)
    waiting = {}
    for number, ((num_tokens, to, is_batch, session), within_s) in enumerate(asks):
        waiting[f"{number}"] = stage.ask(
            f"{number}", num_tokens, to=to, batch=is_batch, session=session, deadline_s=within_s
        )
    now_s, sent = 0.0, {}
    while stage.queue and now_s < 1_000:
        stage.num_waiting = {A: 0, B: 0}
        sent |= dict.fromkeys(stage.release(now_s), now_s)
        now_s += 1.0

    assert sorted([*sent, *stage.refused]) == sorted(waiting)
    for name, at_s in sent.items():
        deadline_s = waiting[name].deadline_s
        assert deadline_s is None or at_s + waiting[name].num_tokens / 1e3 <= deadline_s + 1e-6
    assert all(waiting[name].deadline_s is not None for name in stage.refused)


def test_answers_that_would_be_slow_wait_until_they_would_not() -> None:
    """Where they would be quick enough, or that is not known, nobody waits."""
    stage = Stage(tbt_ms=50.0)
    stage.tbt = {A: 50.1, B: 50.0}
    stage.outlook("slow", 100)
    stage.outlook("quick", 100, to=B)
    assert stage.release() == ["quick"]
    stage.tbt[A] = 49.0
    assert stage.release(1.0) == ["slow"]
    stage.tbt[A] = None
    stage.outlook("not known", 100, at_s=1.0)
    assert stage.release(1.0) == ["not known"]
    assert stage.refused == []


def test_without_a_limit_answers_may_be_slow() -> None:
    """As ever."""
    stage = Stage()
    stage.tbt[A] = 1e6
    assert stage.outlook("any", 100) is None
    assert stage.release() == ["any"]


def test_an_answer_that_stays_slow_for_too_long_is_refused_when_it_comes() -> None:
    """One goes when one ends, so they wait for those in front of them and for one more."""
    stage = Stage(tbt_ms=50.0, max_wait_s=10.0, batch_max_wait_s=30.0)
    stage.tbt[A], stage.ends = 60.0, 0.5
    spare = []
    for number in range(6):
        outlook = stage.outlook(f"{number}", 100, at_s=0.01 * number)
        assert outlook is not None
        spare.append(outlook.spare_ms)
    batch = stage.outlook("batch", 100, batch=True, at_s=0.1)
    urgent = stage.outlook("urgent", 100, deadline_s=5.0, at_s=0.1)

    assert spare == pytest.approx([8_000, 6_000, 4_000, 2_000, 0.0, -2_000])
    assert batch is not None
    assert batch.spare_ms == pytest.approx(30_000 - 14_000)
    assert urgent is not None
    assert urgent.spare_ms == pytest.approx(4_900 - 14_000 - 100)
    assert (urgent.limit, urgent.ttft_ms) == ("tbt", pytest.approx(14_100))


def test_an_answer_that_waited_for_as_long_as_it_may_is_refused() -> None:
    """Whatever was predicted; one that waits for room is not, though answers were slow before."""
    stage = Stage(tbt_ms=50.0, max_wait_s=10.0, patience=1e9)
    stage.lives(1, A, 9_000, 0.0)
    stage.tbt[A] = 60.0  # and nobody knows when answers end
    stage.outlook("slow", 100)
    for now_s in (5.0, 9.0, 9.9):
        assert stage.release(now_s) == []
    assert stage.refused == []
    assert stage.release(10.1) == []
    assert (stage.refused, stage.limits) == (["slow"], ["tbt"])

    stage.lives(1, A, 9_000, 20.0)
    stage.outlook("roomless", 2_000, session=2, at_s=20.0)
    stage.tbt[A] = 40.0
    for now_s in (21.0, 25.0, 29.9):
        assert stage.release(now_s) == []
    assert stage.release(30.1) == ["roomless"]
    assert stage.why == ["waited_out"]
    assert stage.refused == ["slow"]


def test_where_a_prompt_is_answered_elsewhere_that_counts() -> None:
    """Not how fast the replica is that computes it."""
    stage = Stage(tbt_ms=50.0)
    stage.tbt = {A: 10.0, B: 60.0}
    waiting = stage.ask("apart", 100)
    waiting.answers_at = B
    assert stage.release() == []
    stage.tbt[B] = 40.0
    assert stage.release() == ["apart"]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5) | st.none(),  # its session
        st.integers(100, 6_000),  # tokens
        st.integers(0, 30),  # percent of them that are cached
        st.sampled_from([A, B]),
        st.sampled_from(["", "x", "y"]),  # its tenant
        st.integers(0, 3_000),  # ms until it comes
        st.booleans(),  # whether engines have answered meanwhile
    ),
    min_size=1,
    max_size=40,
)


@given(ARRIVALS, st.integers(0, 20_000))
def test_one_that_passes_by_goes_as_if_it_had_been_added(arrivals: Any, idle_ms: int) -> None:
    """The same go for the same reasons, and idle time and tenants' shares are the same after it."""
    added, passed = (Stage(window=1, fill=0.5, quantum_s=1.0) for _ in range(2))
    for stage in (added, passed):
        stage.idle_ms = {A: float(idle_ms), B: float(idle_ms)}
    now_s = 0.0

    for number, (session, num_tokens, percent, to, tenant, ms, answered) in enumerate(arrivals):
        now_s += ms / 1e3
        for stage in (added, passed):
            name = str(number)
            if answered:
                stage.num_waiting = {A: 0, B: 0}
                stage.release(now_s)
            stage.wants[name] = to
            stage.cached[name] = num_tokens * percent // 100
            waiting = Waiting(name, session, num_tokens, now_s, tenant=tenant)
            if stage is passed and not stage.queue:
                stage.sets.expire(now_s)
                choice = stage._choose(waiting)
                assert choice is not None
                verdict = stage.queue.pass_by(waiting, choice, now_s)
                if verdict.goes:
                    stage._send(waiting, to, verdict.why, now_s)
                    continue
            stage.queue.add(waiting)
            stage.release(now_s)

        assert (passed.sent, passed.why) == (added.sent, added.why)
        assert passed.idle_ms == added.idle_ms
        for tenant in ("", "x", "y"):
            assert passed.queue.is_spent(tenant) == added.queue.is_spent(tenant)
