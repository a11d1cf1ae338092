"""Retries: whether a failed or overdue try is followed by another, and whose fault its failure is.

failed     never twice at the same replica, never for the client's own 4xx. At most once more if
           a replica may have begun to work on it, and once more than that if it may have failed to
           fetch blocks. A budget bounds the retries of all requests together
lacking    a replica that lacks the route, or the response that is named, is left for the others
           until one has it: nothing was done there
too many   after a 429 once more, at a replica where no request waits
overdue    a first token that is late is waited for, unless another replica would be sooner

`Witness` tells `router.replicas.deaths` what happens to requests:

    check      a request that comes: is it known to end replicas?
    lost       a try failed: it is a suspect if its replica turns out to be dead or hung
    left       the same, but its client did not wait for that
    answered   it was answered: it is no suspect

A replica that died answers to no probe the moment after, so its watch probes it at once: the
client's own retry comes within half a second. No request waits for that probe. Until its result is
known, a request may be sent to one more replica (`sent_twice`). What one that hangs has
cost is learned from the usual probes. Requests without a body are not watched.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from time import monotonic
from typing import Final

from msgspec.structs import replace

from policies.cost import candidate_costs
from router.api.answers import Ending
from router.api.body import with_fields
from router.api.digests import LARGE_BYTES, body_digest
from router.api.routes import engine_route
from router.base.errors import (
    AnswerUnreadable,
    BadRequest,
    ConnectTimeout,
    NoReplicaAvailable,
    Overdue,
    RequestKills,
    ResponseNotFound,
    RouterError,
    SetAside,
    Stalled,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.config import ForwardConfig
from router.metrics import Metrics
from router.records.record import Outcome, Try
from router.replicas.deaths import Body, Deaths, RetryBudget
from router.replicas.fleet import Fleet
from router.request.fetch import READ_FAILED
from router.request.place import Place
from router.request.results import Inbound, Placement, Prompt, Sent, Tries

_LATE: Final = frozenset({UpstreamTimeout.code, Overdue.code})
"""Failures of a replica that may hang: its probes say so, one more would wait, too."""


class Witness:
    """Tells `Deaths` what happens to requests."""

    def __init__(self, deaths: Deaths, fleet: Fleet) -> None:
        self._deaths = deaths
        self._fleet = fleet

    async def check(self, inbound: Inbound) -> Body | None:
        """Return a request's digest, if any request is suspect.

        Raises:
            RequestKills: it is known to end replicas.
        """
        if not self._deaths.num_suspects or not inbound.body:
            return None
        body = await _digest(inbound)
        refused = self._refusal(body)
        if refused is not None:
            raise refused
        return body

    def refusal(self, tries: Tries) -> RouterError | None:
        """Return why a request must not be sent once more; None: it may be."""
        return self._refusal(tries.digest) if tries.digest is not None else None

    def may_kill(self, tries: Tries) -> bool:
        """Return whether two replicas went down with a request, which may be at fault."""
        return tries.digest is not None and self._deaths.num_deaths(tries.digest) > 1

    async def lost(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        failure: str,
        *,
        is_answered: bool = False,
    ) -> None:
        """Record that a try failed, and have its replica probed.

        Args:
            prompt: The request.
            tries: Its tries.
            placement: The try that failed.
            failure: How it failed.
            is_answered: Whether its client had got a part of the answer.
        """
        received = prompt.read.received
        if not received.body:
            return
        if tries.digest is None:
            tries.digest = await _digest(received)
        tries.lost_lease = placement.lease.number
        self._broke(tries.digest, placement, is_answered=is_answered)
        name = placement.replica
        if failure not in _LATE and not self._fleet.members.is_down(name):
            self._fleet.members.signs(name).broke()

    def left(self, prompt: Prompt, tries: Tries, placement: Placement) -> None:
        """Record that a client left; a suspect if its replica is down, as one that hangs."""
        received = prompt.read.received
        if received.body and self._fleet.members.is_down(placement.replica):
            tries.digest = tries.digest or _digest_now(received)
            self._broke(tries.digest, placement, is_answered=False)

    def answered(self, tries: Tries, placement: Placement, outcome: Outcome) -> None:
        """Record how an answer ended: a request that was answered is no suspect."""
        is_answered = outcome in (Outcome.OK, Outcome.CLIENT_ERROR)
        if is_answered and tries.digest is not None and tries.lost_lease != placement.lease.number:
            self._deaths.clear(tries.digest)

    def _broke(self, body: Body, placement: Placement, *, is_answered: bool) -> None:
        self._deaths.broke(
            placement.replica,
            body,
            is_answered=is_answered,
            begun_s=placement.lease.begun_s,
            now_s=monotonic(),
        )

    def _refusal(self, body: Body) -> RouterError | None:
        now_s = monotonic()
        refusal = self._deaths.refusal(body, now_s)
        if refusal is None:
            return None
        num_replicas = len(refusal.replicas)
        is_one = num_replicas == 1
        which = "A replica went down twice" if is_one else f"{num_replicas} replicas went down"
        return RequestKills(
            f"{which} while processing this request, so it is refused for another "
            f"{math.ceil(refusal.until_s - now_s)} s. Change the request."
        )


async def _digest(inbound: Inbound) -> Body:
    if len(inbound.body or b"") > LARGE_BYTES:
        return await asyncio.to_thread(_digest_now, inbound)
    return _digest_now(inbound)


def _digest_now(inbound: Inbound) -> Body:
    owner = inbound.caller.name or ""
    content_type = inbound.headers.get("Content-Type", "")
    return Body(body_digest(inbound.body or b"", content_type, path=inbound.path, owner=owner))


logger = logging.getLogger(__name__)

BACKOFF_S: Final = 0.05
"""Longest pause before the second try, jittered; doubled for the third."""

OVERDUE_FLOOR_S: Final = 10.0
"""No first token is overdue before this time, unless its request fetches blocks."""

_OVERDUE_RATIO: Final = 3.0  # of the predicted time to the first token

_NOT_SENT: Final = frozenset({UpstreamUnreachable.code, ConnectTimeout.code})
UNLOADED: Final = "adapter_unloaded"
"""A 404 of a replica that has unloaded the adapter; see router.discovery.served_models."""

SET_ASIDE: Final = SetAside.code
"""A replica sleeps, is paused or scales, by its 503 or as `router.discovery.sleep` knows it."""

NO_ROUTE: Final = "no_route"
"""A 404 or 405 of a replica that lacks the route: an older engine in a rolling upgrade."""

NO_RESPONSE: Final = "no_response"
"""A 404 of a replica for a response that no router knows."""

TOO_MANY: Final = "status_429"
"""A replica that has enough to do."""

PREFILL_BROKE: Final = "prefill_broke"
"""Two helpers broke off, and the replica that decodes was not asked."""

NOT_BLAMED: Final = frozenset({UNLOADED, SET_ASIDE, NO_ROUTE, NO_RESPONSE, TOO_MANY, PREFILL_BROKE})
"""Failures that do not count against their replica."""

_NOTHING_DONE: Final = _NOT_SENT | {NO_ROUTE, NO_RESPONSE}
"""Failures that cost nothing: each other replica may be asked, whatever the request does."""

NO_DEATH: Final = frozenset({Ending.ABORTED.value})
"""Failures of a replica that is there, and gives requests up in good order."""

NOT_PROCESSED: Final = _NOT_SENT | NOT_BLAMED | {"status_503"}
"""Failures that say that nothing was computed: the request may move on any number of times."""

_LOOK_AGAIN_S: Final = 1.0  # at an overdue request that was not left
_FETCH_FLOOR_S: Final = 2.0  # no fetch is overdue before this time


class Retries:
    """Judges failed and overdue tries."""

    def __init__(
        self,
        config: ForwardConfig,
        *,
        fleet: Fleet,
        place: Place,
        witness: Witness,
        metrics: Metrics,
    ) -> None:
        self.witness = witness
        self._config = config
        self._fleet = fleet
        self._place = place
        self._metrics = metrics
        self._budget = RetryBudget(config.retry_ratio)

    def note_request(self) -> None:
        """Count a request: the budget is a share of all requests."""
        self._budget.requests.add(1.0, monotonic())

    def objection(
        self, prompt: Prompt, tries: Tries, placement: Placement, failure: str
    ) -> str | None:
        """Return why a failed try may not be followed by one more elsewhere. None: it may."""
        if self.witness.refusal(tries) is not None:
            return "kills"
        if failure not in NOT_PROCESSED and self.witness.may_kill(tries):
            return "kills"
        if failure == PREFILL_BROKE:
            return "sent_twice"
        if failure == AnswerUnreadable.code:
            return "unreadable"
        if failure not in _NOTHING_DONE:
            if prompt.read.has_side_effects and failure != TOO_MANY:
                return "side_effects"
            if _num_asked(tries) >= self._config.max_tries:
                return "max_tries"
            if failure not in NOT_PROCESSED and any(
                each.failure is not None and each.failure not in NOT_PROCESSED
                for each in tries.records
            ):
                return "sent_twice"
        now_s = monotonic()
        if not self._has_candidate(prompt, tries):
            return "no_replica"
        if failure == TOO_MANY:
            has_moved = any(each.failure == TOO_MANY for each in tries.records)
            if has_moved or not self._place.idle_others(prompt, tries):
                return "too_many"
        begun_s = placement.lease.begun_s
        if failure in _NOTHING_DONE or self._budget.can_take(placement.replica, begun_s, now_s):
            return None
        return "budget"

    def may_move_on(self, prompt: Prompt, tries: Tries, placement: Placement, failure: str) -> bool:
        """Return whether a try that gets no answer in time may be followed by one more.

        From a replica that has stalled it moves to one that is up, not to another one that has.
        """
        if self.objection(prompt, tries, placement, failure) is not None:
            return False
        return failure != Stalled.code or self._has_candidate(prompt, tries, is_up=True)

    def judge(
        self, prompt: Prompt, tries: Tries, placement: Placement, failure: str
    ) -> tuple[Prompt, str | None]:
        """Record a failed try, and say whether one more may follow.

        Returns:
            The request as it is sent next, under a salt of its own if a fetch may have failed; and
            why it may not be sent again. None: it may.
        """
        if failure == NO_ROUTE:
            self._lacks_route(prompt, placement)
        objection = self.objection(prompt, tries, placement, failure)
        if failure == TOO_MANY and objection is None:
            tries.only = self._place.idle_others(prompt, tries)
        if objection is not None and self._can_pay(placement, failure):
            resalted = self.resalted(prompt, tries, failure)
            if resalted is not None:
                prompt, objection = resalted, None
        tries.records.append(Try(candidate=placement.lease.candidate, failure=failure))
        tries.failed.append((placement.lease, failure))
        self._excuse(tries, objection)
        return prompt, objection

    def _lacks_route(self, prompt: Prompt, placement: Placement) -> None:
        """Remember that a replica lacks a route, until it is another process."""
        route = engine_route(prompt.read.inbound.method, prompt.read.inbound.path)
        if route is not None and self._fleet.members.lacks(placement.replica, route):
            logger.warning(
                "replica lacks a route: others get its requests",
                extra={"replica": placement.replica, "route": route},
            )

    def last_word(self, prompt: Prompt, tries: Tries) -> RouterError:
        """Return the error for a request whose last replica lacks the route."""
        response_id = prompt.read.response_id
        if response_id is not None and any(e.failure == NO_RESPONSE for e in tries.records):
            return ResponseNotFound(response_id)
        try:
            self._place.candidates(prompt, tries, monotonic())
        except RouterError as exc:
            return exc
        return NoReplicaAvailable("No replica that serves this route can take a request now.")

    def _excuse(self, tries: Tries, objection: str | None) -> None:
        """Decide whose fault the last failure is, and take back what an earlier one counted.

        A request that fails at two replicas in the same way is at fault itself. If no budget is
        left to try another replica, or its answer cannot be read, nothing is proven: else a flood
        of such requests would still take replicas out.
        """
        if objection is not None:
            self._metrics.not_retried.labels(objection).inc()
        failure, before = tries.failed[-1][1], tries.failed[:-1]
        if failure in NOT_PROCESSED:
            return
        same = [other for other, its_failure in before if its_failure == failure]
        if same:
            self._fleet.load.absolve(same[-1])
        if same or objection in ("budget", "unreadable"):
            tries.is_excused = True
            self._metrics.absolved.labels("same_elsewhere" if same else "unproven").inc()

    def may_send_again(self, helper: Placement, failure: str) -> bool:
        """Return whether a prompt that failed there may be computed at another replica; count it.

        From the same budget: else a pool of helpers that fail is asked twice for all.
        """
        if failure in _NOT_SENT:
            return True
        if not self._budget.can_take(helper.replica, helper.lease.begun_s, monotonic()):
            return False
        self.take(helper)
        return True

    def take(self, placement: Placement) -> bool:
        """Charge the retry budget: what failed there is sent again. Return whether it counted."""
        return self._budget.take(placement.replica, placement.lease.begun_s, monotonic())

    async def move_on(self, prompt: Prompt, tries: Tries, placement: Placement) -> None:
        """Leave a replica at which the last try failed, after a pause where that helps."""
        name, failure = placement.replica, tries.failed[-1][1]
        if failure == NO_RESPONSE:
            return  # a question, no failure
        self._metrics.failovers.labels(name, failure).inc()
        logger.warning(
            "retried on another replica before the first byte",
            extra={"request": prompt.read.request_id, "replica": name, "reason": failure},
        )
        if failure in _NOTHING_DONE:
            return
        is_charged = self.take(placement)
        if failure != Overdue.code:  # it waited enough
            pause_s = BACKOFF_S * 2.0 ** (len(tries.failed) - 1)
            try:
                await asyncio.sleep(random.uniform(0.0, pause_s))
            except asyncio.CancelledError:  # its client left: it is not sent again
                if is_charged:
                    self._budget.give_back(name, monotonic())
                raise

    # ---------------------------------------------------------------- overdue

    def overdue_s(self, placement: Placement) -> float | None:
        """Return after how long a first token is overdue. None: never.

        Sooner for a request that fetches blocks: such reads hang, for a minute over TCP.
        """
        floor_s = _FETCH_FLOOR_S if placement.may_fetch else OVERDUE_FLOOR_S
        return self._fleet.load.overdue_s(placement.lease, ratio=_OVERDUE_RATIO, floor_s=floor_s)

    def wait_s(self, prompt: Prompt, tries: Tries, placement: Placement) -> float | None:
        """Return how long to wait on for an overdue first token. None: leave now.

        Another replica must be predicted to be sooner than this one is late already. Then waiting
        and leaving together cost at most twice the better of both. If requests wait there for half
        as long as this one has waited, the fleet is loaded, and leaving would only add load.
        """
        self._suspect_read(placement)
        objection = self.objection(prompt, tries, placement, Overdue.code)
        if objection is not None:
            self._metrics.overdue.labels(objection).inc()
            return _LOOK_AGAIN_S
        now_s = monotonic()
        try:
            plan = self._place.plan(prompt, tries)
        except RouterError:
            return _LOOK_AGAIN_S
        costs = candidate_costs(plan.snapshot)
        [ttft_ms] = [cost.ttft_ms for cost in costs if cost.id == plan.candidate.id]
        waited_s = now_s - placement.lease.begun_s
        late_ms = waited_s * 1000.0 - placement.lease.predicted_ms
        is_late = self._fleet.load.longest_wait_s(plan.candidate.id, now_s) >= waited_s / 2
        if is_late or ttft_ms >= late_ms:
            self._metrics.overdue.labels("late_elsewhere").inc()
            return _LOOK_AGAIN_S
        signs = self._fleet.members.signs(placement.replica)
        if signs.overdue_s is None and not placement.may_fetch:
            signs.overdue_s = placement.lease.begun_s
        self._metrics.overdue.labels("left").inc()
        return None

    def _suspect_read(self, placement: Placement) -> None:
        """Suspect the reads of a candidate, unless an older request waits: that is a queue."""
        fetches, lease, now_s = self._place.fetches, placement.lease, monotonic()
        if fetches is None or not placement.may_fetch:
            return
        if self._fleet.load.longest_wait_s(lease.candidate, now_s) <= now_s - lease.begun_s:
            fetches.suspect(lease)

    # ---------------------------------------------------------------- a salt of its own

    def resalted(self, prompt: Prompt, tries: Tries, failure: str | None = None) -> Prompt | None:
        """Return a request of which no cache has anything, if a fetch may have failed. Else None.

        For a request that could not be sent again otherwise, or whose other replicas have gone out
        meanwhile. Until the master drops what a dead engine held (10 s), every replica that looks
        there finds the objects and fails to read them (`kv_load_failure_policy: fail`). No field
        forbids a read; under a salt of its own, a prompt's blocks have other names.
        """
        failures = (failure, *(each.failure for each in tries.records))
        if self._place.fetches is None or READ_FAILED.isdisjoint(failures):
            return None
        if prompt.read.request is None or prompt.original is not None:
            return None
        resalted = _with_own_salt(prompt)
        if resalted is not None:
            tries.is_excused = True
            self._metrics.pool_skipped.inc()
            if not self._has_candidate(prompt, tries):
                tries.replicas.clear()
        return resalted

    def _can_pay(self, placement: Placement, failure: str) -> bool:
        """Return whether the budget has one more try; a failure before this one may be counted."""
        if failure in _NOT_SENT:
            return True
        return self._budget.can_take(placement.replica, placement.lease.begun_s, monotonic())

    def _has_candidate(self, prompt: Prompt, tries: Tries, *, is_up: bool = False) -> bool:
        """Return whether another replica may get a request; `is_up`: one that is up."""
        now_s = monotonic()
        try:
            found = self._place.candidates(prompt, tries, now_s)
        except RouterError:
            return False
        return not is_up or any(
            self._fleet.members.is_up(each.replica.name, now_s) for each in found
        )


def _with_own_salt(prompt: Prompt) -> Prompt | None:
    """Return a request under a salt of its own. None: its body has the field too often."""
    salt, read = secrets.token_hex(8), prompt.read
    try:
        body = with_fields(read.inbound.body or b"{}", {"cache_salt": salt})
    except BadRequest:
        return None
    read = replace(read, inbound=replace(read.inbound, body=body), salt=salt)
    extra = replace(prompt.extra, cache_salt=salt)
    return replace(prompt, read=read, extra=extra, chains={}, found={}, original=prompt)


def _num_asked(tries: Tries) -> int:
    """Count the replicas that were sent a request, without those that had nothing to do with it."""
    return len(tries.replicas) - sum(
        each.failure in (NO_ROUTE, NO_RESPONSE) for each in tries.records
    )


def outcome_of(sent: Sent, placement: Placement) -> Outcome:
    """Return how a failed try ended, seen from its replica."""
    if sent.failure in NOT_BLAMED:
        return Outcome.CLIENT_ERROR
    if isinstance(sent.error, Overdue):
        return Outcome.POOL_OVERDUE if placement.may_fetch else Outcome.OVERDUE
    is_refused = isinstance(sent.error, UpstreamUnreachable)
    return Outcome.REPLICA_UNREACHABLE if is_refused else Outcome.REPLICA_FAILED
