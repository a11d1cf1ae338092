"""Wait: prompts stay in the router until an engine has room for them (`queue.mode`).

Whether they do may be a variant's own, too, so that the queue can be tried on some of the traffic.

Which one may go, and in what order, is `router.scheduling.queue`'s. Here is when it is asked: when
a request comes, when a candidate may have got room (a first token, a lease's end, ours or another
router's, a change of health), and every `LOOK_S` while any wait. Choosing and booking are one step
within a release, so what one takes the next one sees. A request waits once: a retry does not, nor
what only one replica can answer.

An error is the one request's that it befalls. No task runs: while nothing waits, nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.config import QueueConfig
from router.errors import DeadlineUnmet, QueueFull, TbtUnmet
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.ledger import NOTHING, InFront
from router.replicas.recent import RecentRate
from router.request.admit import Admission
from router.request.decide import Decider
from router.request.job import Choice, Job, Placement
from router.request.service import class_of, deadline_ms_of
from router.request.turns import TURN_S
from router.scheduling.classes import BATCH, INTERACTIVE
from router.scheduling.queue import Limit, Outlook, Queue, Verdict
from router.scheduling.waiting import QueueRules, Waiting
from router.tenants import Tenant

LOOK_S: Final = 0.05
"""How often those who wait are looked at, if nothing else happens: time makes room, too."""

_PACE_S: Final = (30.0, 1e-3)  # at which requests leave: time constant, and least to judge by
_MAX_RETRY_AFTER_S: Final = 60.0

MAX_WAITING: Final = 10_000
"""Requests in the queue; others get 429."""


class _Seat(Struct):
    """One job that waits, and what will become of it."""

    job: Job
    placed: asyncio.Future[Placement]
    choice: Choice | None = None  # the last one


class WaitingRoom:
    """Where prompts wait; on a router's event loop.

    Args:
        is_on: Whether they do, unless a request's arm says otherwise.
    """

    def __init__(
        self,
        config: QueueConfig,
        *,
        is_on: bool,
        fleet: Fleet,
        decider: Decider,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._is_on = is_on
        self._decider = decider
        self._admission = admission
        self._metrics = metrics
        self._rules = QueueRules(
            fill=config.fill, max_wait_s=config.max_wait_s, tbt_ms=config.tbt_ms
        )
        self._queue: Queue[Choice] = Queue(self._rules, fleet.working_sets, fleet, self._has_blocks)
        self._pace = RecentRate(*_PACE_S, begun_s=monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        fleet.on_change = self._wake
        queue = self._queue
        metrics.waiting.set_function(lambda: float(len(queue)))
        metrics.class_waiting.labels(BATCH).set_function(lambda: float(queue.num_batch))
        metrics.class_waiting.labels(INTERACTIVE).set_function(
            lambda: float(len(queue) - queue.num_batch)
        )

    @property
    def num_waiting(self) -> int:
        """Count those who wait."""
        return len(self._queue)

    @property
    def tbt_limit_ms(self) -> float | None:
        """Return how far apart an answer's tokens may be; None: there is no limit."""
        return self._rules.tbt_ms

    def is_on(self, job: Job) -> bool:
        """Return whether a prompt may have to wait: its arm says so, or else the router."""
        if job.prompt is None:
            return False
        queue = job.assigned.queue if job.assigned is not None else None
        return self._is_on if queue is None or queue.mode is None else queue.mode == "on"

    def takes(self, job: Job) -> bool:
        """Return whether a request has to wait here before it is placed."""
        if job.owner is not None or not self.is_on(job):
            return False
        return job.released is None and not job.tries

    def read(self, job: Job) -> None:
        """Read a prompt's class and deadline.

        Raises:
            BadRequest: a header makes no sense.
        """
        headers, default_s = job.inbound.headers, self._config.deadline_s
        job.service_class = class_of(headers, job.tenant)
        job.deadline_ms = deadline_ms_of(headers)
        is_interactive = job.service_class == INTERACTIVE
        if job.deadline_ms is None and default_s is not None and is_interactive:
            job.deadline_ms = 1e3 * default_s

    async def place(self, job: Job, on_left: Callable[[Job, Choice | None], None]) -> Placement:
        """Wait until a request may go, and book it.

        Args:
            job: Whose.
            on_left: Called with its last choice if its client leaves before it was placed.

        Raises:
            QueueFull: too many wait already, or too many came while it waited.
            DeadlineUnmet, TbtUnmet: its first token would come too late, or its answer too slowly.
            RouterError: it cannot be placed, as `Decider.decide` and `Admission.admit` say.
        """
        now_s = monotonic()
        waiting = self._waiting(job, now_s)
        if not self._queue:
            try:
                placement = self._at_once(job, waiting, now_s)
            except Exception:
                self._observe(job, "refused", 0.0)
                raise
            if placement is not None:
                self._observe(job, "released", 0.0)
                return placement
        if len(self._queue) >= MAX_WAITING:
            if not self._displace(job, now_s):
                self._refused(job, "full")
                self._observe(job, "refused", 0.0)
                raise QueueFull(retry_after_s=self._retry_after_s(now_s))
        seat: _Seat = waiting.item
        self._queue.add(waiting)
        try:
            if waiting.deadline_s is not None:
                self._expect(waiting, now_s)
            if self._next is None:  # else it comes at once
                self._release()
            placement = await seat.placed
        except asyncio.CancelledError:
            self._left(waiting, seat, on_left)
            raise
        except Exception:
            self._forget(waiting, seat)
            self._observe(job, "refused", monotonic() - now_s)
            raise
        self._observe(job, "released", job.waited_ms / 1e3)
        return placement

    def judge(self, job: Job, choice: Choice) -> tuple[Verdict, Outlook, float | None]:
        """Return whether a request that comes now would go at once to where it was chosen to go.

        And its outlook, and the time between its answer's tokens in ms, None: not known.
        """
        now_s, prompt = monotonic(), choice.prompt
        asked = self._waiting(job, now_s)
        asked.answers_at = choice.candidate.id
        return (
            self._queue.judge(asked, prompt, now_s),
            self._queue.outlook(asked, prompt, now_s),
            self._queue.tbt_ms(asked, prompt, now_s),
        )

    def _waiting(self, job: Job, now_s: float) -> Waiting:
        """Write a request down as one that waits from now on."""
        tenant = job.tenant
        return Waiting(
            item=_Seat(job, asyncio.get_running_loop().create_future()),
            session=job.session_hash,
            num_tokens=job.num_tokens + job.num_more_tokens,
            since_s=now_s,
            is_batch=job.service_class == BATCH,
            tenant=tenant.name if tenant is not None else "",
            weight=tenant.weight if tenant is not None else 1.0,
            priority=_priority(tenant),
            deadline_s=_deadline_s(job),
            rules=self._rules_of(job),
        )

    def _at_once(self, job: Job, waiting: Waiting, now_s: float) -> Placement | None:
        """Book a request that comes while none waits; None: it has to wait, or has a deadline.

        As mostly: it needs no place in the queue, nor a turn of the loop.

        Raises:
            RouterError: as `place`.
        """
        if waiting.deadline_s is not None:
            return None
        choice = self._decider.decide(job)
        waiting.answers_at = choice.candidate.id
        verdict = self._queue.start(waiting, choice.prompt, now_s)
        if not verdict.goes:
            return None
        return self._book(job, waiting, choice, verdict.why, now_s)

    def _book(
        self, job: Job, waiting: Waiting, choice: Choice, why: str, now_s: float
    ) -> Placement:
        """Book a request that may go, and say so to its records.

        Raises:
            RouterError: as `Admission.admit`.
        """
        job.waited_ms = (now_s - waiting.since_s) * 1e3
        job.released = why
        job.waited_for = waiting.held_by
        if self._rules.tbt_ms is not None:
            job.expected_tbt_ms = self._queue.tbt_ms(waiting, choice.prompt, now_s)
        placement = self._admission.admit(job, choice)
        self._decider.count(job)
        self._pace.add(now_s)
        self._metrics.released.labels(why).inc()
        return placement

    def _rules_of(self, job: Job) -> QueueRules | None:
        """Return the rules of a request's arm; None: the configuration's."""
        queue = job.assigned.queue if job.assigned is not None else None
        if queue is None:
            return None
        return None if queue.fill is None else replace(self._rules, fill=queue.fill)

    # Releases

    def _wake(self) -> None:
        """Have a release soon: one for all that happens until then."""
        if self._queue and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        """Send all that may go, and look again in a while at those who stay."""
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
            if self._queue:
                self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._release)

    def _choose(self, waiting: Waiting, in_front_ms: InFront = NOTHING) -> Choice | None:
        """Choose where a request goes; return where its prompt is computed, for which it waits."""
        seat: _Seat = waiting.item
        if seat.placed.done():
            return None
        try:
            seat.choice = self._decider.decide(seat.job, in_front_ms)
        except Exception as exc:
            _fail(seat, exc)
            return None
        waiting.answers_at = seat.choice.candidate.id
        return seat.choice.prompt

    def _has_blocks(self, waiting: Waiting, choice: Choice) -> bool:
        seat: _Seat = waiting.item
        return self._decider.has_room(seat.job, choice)

    def _expect(self, waiting: Waiting, now_s: float) -> None:
        """Refuse a request that has just come if its limits cannot be kept."""
        choice = self._choose(waiting)
        if choice is None:
            self._queue.remove(waiting)  # it has failed
            return
        outlook = self._queue.expect(waiting, choice, now_s)
        job: Job = waiting.item.job
        if job.deadline_ms is not None:
            job.expected_ttft_ms = 1e3 * (now_s - job.inbound.arrived_s) + outlook.ttft_ms
        if outlook.spare_ms < 0.0:
            self._queue.remove(waiting)
            self._refuse(waiting, "deadline", -outlook.spare_ms)

    def _refuse(self, waiting: Waiting, limit: Limit, excess_ms: float) -> None:
        """Refuse a request that would miss a limit by so much."""
        seat: _Seat = waiting.item
        if not seat.placed.done():
            self._refused(seat.job, limit)
            retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, excess_ms / 1e3))
            error = DeadlineUnmet if limit == "deadline" else TbtUnmet
            seat.placed.set_exception(error(retry_after_s=retry_after_s))

    def _send(self, waiting: Waiting, choice: Choice, why: str) -> None:
        seat: _Seat = waiting.item
        job, now_s = seat.job, monotonic()
        assert seat.choice is not None
        try:
            placement = self._book(job, waiting, seat.choice, why, now_s)
        except Exception as exc:
            _fail(seat, exc)
            return
        seat.placed.set_result(placement)

    def _left(
        self, waiting: Waiting, seat: _Seat, on_left: Callable[[Job, Choice | None], None]
    ) -> None:
        """Let go of a request whose client has left, or which this router's end cuts."""
        self._forget(waiting, seat)
        seat.job.waited_ms = (monotonic() - waiting.since_s) * 1e3
        self._observe(seat.job, "client_gone", seat.job.waited_ms / 1e3)
        on_left(seat.job, seat.choice)

    def _forget(self, waiting: Waiting, seat: _Seat) -> None:
        """Take a request out, and give back what was booked for it and is not used any more."""
        self._queue.remove(waiting)
        placed = seat.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            self._admission.abandon(placed.result())

    def _displace(self, job: Job, now_s: float) -> bool:
        """Refuse a request to make place for one that goes before it; False: none waits."""
        displaced = self._queue.displaced(
            is_batch=job.service_class == BATCH, priority=_priority(job.tenant)
        )
        if displaced is None:
            return False
        retry_after_s = self._retry_after_s(now_s)
        self._queue.remove(displaced)
        seat: _Seat = displaced.item
        if not seat.placed.done():
            self._refused(seat.job, "displaced")
            seat.placed.set_exception(QueueFull(retry_after_s=retry_after_s))
        return True

    def _observe(self, job: Job, end: str, waited_s: float) -> None:
        self._metrics.waits.labels(end).observe(waited_s)
        if job.service_class is not None:
            self._metrics.class_waits.labels(job.service_class, end).observe(waited_s)

    def _refused(self, job: Job, reason: str) -> None:
        self._metrics.queue_refused.labels(job.service_class or INTERACTIVE, reason).inc()

    def _retry_after_s(self, now_s: float) -> float:
        """Return after how long those who wait now will have gone, at the pace of late."""
        per_s = self._pace.at(now_s)
        if per_s <= 0.0:
            return _MAX_RETRY_AFTER_S
        return min(_MAX_RETRY_AFTER_S, max(1.0, len(self._queue) / per_s))


def _fail(seat: _Seat, error: Exception) -> None:
    """Let an error be the one request's that it befalls."""
    if isinstance(error, StopIteration):  # cannot be set on a future
        error = RuntimeError(type(error).__name__)
    seat.placed.set_exception(error)


def _priority(tenant: Tenant | None) -> int:
    return tenant.priority if tenant is not None else 0


def _deadline_s(job: Job) -> float | None:
    if job.deadline_ms is None:
        return None
    return job.inbound.arrived_s + job.deadline_ms / 1e3
