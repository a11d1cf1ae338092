"""The queue: prompts stay in the router until a replica has room for them (`queue.mode`).

`router.scheduling.queue` decides which prompt may go, and in what order. This module asks it when a
request comes, when a candidate may have got room, and every `LOOK_S` while any request waits. Room
comes with a first token, the end of a lease at any router, or a change of health. Plan and commit
are one step within a release, so each release sees the ones before it.

A request waits once. A retry does not wait, nor a request that only one replica can answer. A
request's variant may switch the queue on or off for it.

An error fails the one request that it concerns. No task runs: while nothing waits, nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.api.sessions import engine_name
from router.base.bounded import RecentRate
from router.base.errors import DeadlineUnmet, QueueFull, TbtUnmet
from router.base.loop_turns import TURN_S
from router.config import QueueConfig
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.request.place import Place
from router.request.results import Placement, Plan, Prompt, Read, Tries, Variant, Wait
from router.scheduling.order import BATCH, INTERACTIVE, ServiceClass, class_of, deadline_ms_of
from router.scheduling.queue import ALONE, Elsewhere, Limit, Outlook, Queue
from router.scheduling.rules import Verdict
from router.scheduling.waiting import (
    DEFAULT_RULES,
    LATE,
    NOTHING,
    InFront,
    QueueRules,
    Waiting,
    Where,
)

LOOK_S: Final = 0.05
"""How often the queue is looked at if nothing else happens: time makes room, too."""

_PACE_S: Final = (30.0, 1e-3)  # at which requests leave: time constant, and least to judge by
_MAX_RETRY_AFTER_S: Final = 60.0

KEEPALIVE_S: Final = 15.0
"""How often a waiting stream's client gets a keep-alive: usual proxies drop a connection that is
silent for 60 to 100 s."""

MAX_WAITING: Final = 10_000
"""Requests in the queue; others get 429."""


class _Seat(Struct):
    """One prompt that waits, and what will become of it."""

    prompt: Prompt
    tries: Tries
    placed: asyncio.Future[Placement]
    plan: Plan | None = None  # the last one


class WaitingRoom:
    """Where prompts wait; on a router's event loop.

    Args:
        is_on: Whether prompts wait, unless their variant says otherwise.
        keeps_alive: Whether clients of streams get keep-alives while they wait.
        rules: When a prompt may go, besides what the configuration says.
        elsewhere: The queues of other routers.
    """

    def __init__(
        self,
        config: QueueConfig,
        *,
        is_on: bool,
        fleet: Fleet,
        place: Place,
        metrics: Metrics,
        keeps_alive: bool = True,
        rules: QueueRules = DEFAULT_RULES,
        elsewhere: Elsewhere = ALONE,
    ) -> None:
        self._config = config
        self._is_on = is_on
        self._place = place
        self._metrics = metrics
        self._keeps_alive = keeps_alive
        self._rules = replace(
            rules, fill=config.fill, max_wait_s=config.max_wait_s, tbt_ms=config.tbt_ms
        )
        self._queue: Queue[Plan] = Queue(
            self._rules, fleet.conversations, fleet.load, self._has_blocks, elsewhere
        )
        self._pace = RecentRate(*_PACE_S, begun_s=monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        self._once_changed = fleet.members.once_changed
        queue = self._queue
        metrics.waiting.set_function(lambda: float(len(queue)))
        metrics.class_waiting.labels(BATCH).set_function(lambda: float(queue.num_batch))
        metrics.class_waiting.labels(INTERACTIVE).set_function(
            lambda: float(len(queue) - queue.num_batch)
        )

    @property
    def num_waiting(self) -> int:
        """Count requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[tuple[Waiting, Prompt]]:
        """Yield the requests that wait, in order of arrival."""
        return ((waiting, waiting.item.prompt) for waiting in self._queue)

    def held_by(self, waiting: Waiting) -> str | None:
        """Return what a request waits for, as `Verdict.why`. None: for those before it."""
        return self._queue.held_by(waiting)

    def describe(self, waiting: Waiting) -> dict[str, Any]:
        """Describe a request that waits, in JSON: for what, since when, behind how many.

        After `late_s` more it goes before all others. Its wait is not predicted: of simulated
        agents with 1.3 to 3 caches of contexts, the recent pace of releases was within a factor of
        two of 30 to 48 % of the waits, and the 25 most similar earlier waits of 38 to 70 %.
        """
        prompt: Prompt = waiting.item.prompt
        read, whose = prompt.read, prompt.read.whose
        waited_s = monotonic() - waiting.since_s
        late_s = LATE * self._rules.longest_wait_s(is_batch=waiting.is_batch)
        return {
            "request": read.request_id,
            "session": engine_name(whose.conversation) if whose.conversation is not None else None,
            "tenant": read.inbound.caller.name,
            "model": read.model,
            "class": prompt.service_class,
            "tokens": waiting.num_tokens,
            "waited_s": round(waited_s, 1),
            "for": self._queue.held_by(waiting),
            "before": self._queue.num_before(waiting),
            "late_s": round(max(0.0, late_s - waited_s), 1),
        }

    @property
    def tbt_limit_ms(self) -> float | None:
        """Return the limit on inter-token latency. None: there is none."""
        return self._rules.tbt_ms

    def is_on(self, read: Read, variant: Variant | None) -> bool:
        """Return whether a prompt may have to wait: its variant says so, or else the router."""
        if read.request is None:
            return False
        return self._is_on if variant is None or variant.waits is None else variant.waits

    def takes(self, prompt: Prompt, tries: Tries) -> bool:
        """Return whether a request has to wait here before it is placed."""
        if prompt.owner is not None or not self.is_on(prompt.read, prompt.variant):
            return False
        return tries.wait.released is None and not tries.records

    def keepalive_s(self, prompt: Prompt, tries: Tries) -> float | None:
        """Return how often a request's client gets a keep-alive once it waits. None: never."""
        is_kept = self._keeps_alive and prompt.read.streams and self.takes(prompt, tries)
        return KEEPALIVE_S if is_kept else None

    def service(
        self, read: Read, variant: Variant | None
    ) -> tuple[ServiceClass | None, float | None]:
        """Return the class and the deadline in ms of a request. None: it never waits.

        Raises:
            BadRequest: a header makes no sense.
        """
        if not self.is_on(read, variant):
            return None, None
        headers, default_s = read.inbound.headers, self._config.deadline_s
        service_class = class_of(headers, is_batch=read.inbound.caller.is_batch)
        deadline_ms = deadline_ms_of(headers)
        if deadline_ms is None and default_s is not None and service_class == INTERACTIVE:
            deadline_ms = 1e3 * default_s
        return service_class, deadline_ms

    async def place(
        self, prompt: Prompt, tries: Tries, on_left: Callable[[Plan | None], None]
    ) -> Placement:
        """Wait until a request may go, and place it. `tries.wait` says what became of it.

        Args:
            prompt: What to place.
            tries: The request's tries.
            on_left: Called with its last plan if its client leaves before it was placed.

        Raises:
            QueueFull: too many wait already, or too many came while it waited.
            DeadlineUnmet, TbtUnmet: its first token would come too late, or its answer too slowly.
            RouterError: as `Place.plan` and `Place.commit`.
        """
        now_s = monotonic()
        waiting = self._waiting(prompt, tries, now_s)
        if not self._queue:
            try:
                placement = self._at_once(waiting, now_s)
            except Exception:
                self._queue.left(waiting, now_s)
                self._observe(prompt, "refused", 0.0)
                raise
            if placement is not None:
                self._observe(prompt, "released", 0.0)
                return placement
        if len(self._queue) >= MAX_WAITING:
            if not self._displace(prompt, now_s):
                self._refused(prompt, "full")
                self._observe(prompt, "refused", 0.0)
                raise QueueFull(retry_after_s=self._retry_after_s(now_s))
        seat: _Seat = waiting.item
        self._queue.add(waiting)
        try:
            if waiting.deadline_s is not None:
                self._expect(waiting, now_s)
            if self._next is None:  # else it comes at once
                self.release()
            tries.waiting = waiting
            if tries.on_wait is not None and not seat.placed.done():
                tries.on_wait()
            placement = await seat.placed
        except asyncio.CancelledError:
            self._left(waiting, on_left)
            raise
        except Exception:
            self._remove(waiting)
            self._observe(prompt, "refused", monotonic() - now_s)
            raise
        self._observe(prompt, "released", tries.wait.waited_ms / 1e3)
        return placement

    def judge(self, prompt: Prompt, plan: Plan) -> tuple[Verdict, Outlook, float | None]:
        """Return whether a request that comes now would be sent at once, where it was planned.

        And its outlook, and its predicted inter-token latency in ms. None: not known.
        """
        now_s, computing = monotonic(), plan.helper or plan
        asked = self._waiting(prompt, Tries(), now_s)
        asked.answers_at = plan.candidate.id
        return (
            self._queue.judge(asked, computing, now_s),
            self._queue.outlook(asked, computing, now_s),
            self._queue.rules.tbt_ms(asked, computing, now_s),
        )

    def _waiting(self, prompt: Prompt, tries: Tries, now_s: float) -> Waiting:
        """Return a request as one that waits from now on."""
        return Waiting(
            item=_Seat(prompt, tries, asyncio.get_running_loop().create_future()),
            session=prompt.read.whose.session_hash,
            group=prompt.read.model,
            parent=prompt.read.whose.parent_session_hash,
            num_tokens=prompt.num_tokens + prompt.num_more_tokens,
            since_s=now_s,
            is_batch=prompt.service_class == BATCH,
            caller=prompt.read.inbound.caller,
            deadline_s=_deadline_s(prompt),
            fill=None if prompt.variant is None else prompt.variant.fill,
        )

    def _at_once(self, waiting: Waiting, now_s: float) -> Placement | None:
        """Place a request that comes while none waits. None: it has to wait, or has a deadline.

        The usual case: it needs no place in the queue, nor a turn of the loop.

        Raises:
            RouterError: as `place`.
        """
        if waiting.deadline_s is not None:
            return None
        seat: _Seat = waiting.item
        self._queue.arrive(waiting, now_s)
        plan = self._place.plan(seat.prompt, seat.tries, NOTHING, self._queue.rules.where(waiting))
        waiting.answers_at = plan.candidate.id
        computing = plan.helper or plan
        verdict = self._queue.judge(waiting, computing, now_s)
        if not verdict.goes:
            return None
        placement = self._commit(waiting, plan, verdict.why, now_s)
        self._queue.sent(waiting, computing)
        return placement

    def _commit(self, waiting: Waiting, plan: Plan, why: str, now_s: float) -> Placement:
        """Place a request that may go, and record its wait.

        Raises:
            RouterError: as `Place.commit`.
        """
        seat: _Seat = waiting.item
        tries = seat.tries
        tries.wait = replace(
            tries.wait,
            waited_ms=(now_s - waiting.since_s) * 1e3,
            held_by=waiting.held_by,
            released=why,
        )
        if self._rules.tbt_ms is not None:
            tbt_ms = self._queue.rules.tbt_ms(waiting, plan.helper or plan, now_s)
            tries.wait = replace(tries.wait, expected_tbt_ms=tbt_ms)
        placement = self._place.commit(seat.prompt, tries, plan)
        self._pace.add(now_s)
        self._metrics.released.labels(why).inc()
        return placement

    # Releases

    def _wake(self) -> None:
        """Schedule a release soon: one for all that happens until then."""
        if self._queue and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self.release)

    def release(self) -> None:
        """Send all requests that may go, and look again in a while at the others."""
        for handle in (self._next, self._timer):
            if handle is not None:
                handle.cancel()
        self._next = self._timer = None
        until_s = perf_counter() + TURN_S

        def has_time() -> bool:
            return perf_counter() < until_s

        try:
            if not self._queue.release(
                monotonic(), self._choose, self._send, self._refuse, has_time
            ):
                self._wake()
        finally:
            self._queue.publish_waiting(monotonic())
            if self._queue:
                self._once_changed.add(self._wake)
                self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.release)

    def _choose(self, waiting: Waiting, in_front_ms: InFront, where: Where) -> Plan | None:
        """Plan where a request goes; return the plan for its prompt. None: it is over."""
        seat: _Seat = waiting.item
        if seat.placed.done():
            return None
        try:
            seat.plan = self._place.plan(seat.prompt, seat.tries, in_front_ms, where)
        except Exception as exc:
            _fail(seat, exc)
            return None
        waiting.answers_at = seat.plan.candidate.id
        return seat.plan.helper or seat.plan

    def _has_blocks(self, waiting: Waiting, plan: Plan) -> bool:
        seat: _Seat = waiting.item
        return self._place.has_room(seat.prompt, plan)

    def _expect(self, waiting: Waiting, now_s: float) -> None:
        """Refuse a request that has just come if its limits cannot be kept."""
        plan = self._choose(waiting, NOTHING, self._queue.rules.where(waiting))
        if plan is None:
            self._queue.remove(waiting, monotonic())  # it has failed
            return
        outlook = self._queue.expect(waiting, plan, now_s)
        seat: _Seat = waiting.item
        if seat.prompt.deadline_ms is not None:
            since_arrival_ms = 1e3 * (now_s - seat.prompt.read.inbound.arrived_s)
            seat.tries.wait = Wait(expected_ttft_ms=since_arrival_ms + outlook.ttft_ms)
        if outlook.spare_ms < 0.0:
            self._queue.remove(waiting, monotonic())
            self._refuse(waiting, "deadline", -outlook.spare_ms)

    def _refuse(self, waiting: Waiting, limit: Limit, excess_ms: float) -> None:
        """Refuse a request that would miss a limit by so much."""
        seat: _Seat = waiting.item
        if not seat.placed.done():
            self._refused(seat.prompt, limit)
            retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, excess_ms / 1e3))
            error = DeadlineUnmet if limit == "deadline" else TbtUnmet
            seat.placed.set_exception(error(retry_after_s=retry_after_s))

    def _send(self, waiting: Waiting, plan: Plan, why: str) -> bool:
        seat: _Seat = waiting.item
        now_s = monotonic()
        assert seat.plan is not None
        try:
            placement = self._commit(waiting, seat.plan, why, now_s)
        except Exception as exc:
            _fail(seat, exc)
            return False
        seat.placed.set_result(placement)
        return True

    def _left(self, waiting: Waiting, on_left: Callable[[Plan | None], None]) -> None:
        """Remove a request whose client has left, or which this router's end cuts."""
        seat: _Seat = waiting.item
        self._remove(waiting)
        waited_ms = (monotonic() - waiting.since_s) * 1e3
        seat.tries.wait = replace(seat.tries.wait, waited_ms=waited_ms)
        self._observe(seat.prompt, "client_gone", waited_ms / 1e3)
        on_left(seat.plan)

    def _remove(self, waiting: Waiting) -> None:
        """Remove a request; end its placement if it was placed and will not be sent."""
        self._queue.remove(waiting, monotonic())
        placed = waiting.item.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            self._place.abandon(waiting.item.tries, placed.result())

    def _displace(self, prompt: Prompt, now_s: float) -> bool:
        """Refuse a request to make place for one that goes before it. False: none waits."""
        displaced = self._queue.displaced(
            is_batch=prompt.service_class == BATCH, priority=prompt.read.inbound.caller.priority
        )
        if displaced is None:
            return False
        retry_after_s = self._retry_after_s(now_s)
        self._queue.remove(displaced, now_s)
        seat: _Seat = displaced.item
        if not seat.placed.done():
            self._refused(seat.prompt, "displaced")
            seat.placed.set_exception(QueueFull(retry_after_s=retry_after_s))
        return True

    def _observe(self, prompt: Prompt, end: str, waited_s: float) -> None:
        self._metrics.waits.labels(end).observe(waited_s)
        if prompt.service_class is not None:
            self._metrics.class_waits.labels(prompt.service_class, end).observe(waited_s)

    def _refused(self, prompt: Prompt, reason: str) -> None:
        self._metrics.queue_refused.labels(prompt.service_class or INTERACTIVE, reason).inc()

    def _retry_after_s(self, now_s: float) -> float:
        """Return after how long the queue of now will be empty, at the recent pace."""
        per_s = self._pace.at(now_s)
        if per_s <= 0.0:
            return _MAX_RETRY_AFTER_S
        return min(_MAX_RETRY_AFTER_S, max(1.0, len(self._queue) / per_s))


def _fail(seat: _Seat, error: Exception) -> None:
    """Fail the one request that an error concerns."""
    if isinstance(error, StopIteration):  # cannot be set on a future
        error = RuntimeError(type(error).__name__)
    seat.placed.set_exception(error)


def _deadline_s(prompt: Prompt) -> float | None:
    if prompt.deadline_ms is None:
        return None
    return prompt.read.inbound.arrived_s + prompt.deadline_ms / 1e3
