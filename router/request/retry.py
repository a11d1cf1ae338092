"""Retries: whether a try that failed is followed by one more, and whose fault its failure is.

Never twice to the same replica, never again for the client's own 4xx, and once more at most where
a replica may have begun to work on it; once more than that, anywhere, where a read from the pool
may have failed. A budget bounds the retries of all requests together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from time import monotonic
from typing import Final

from msgspec.structs import replace

from router.api.body_fields import with_fields
from router.config import ForwardConfig
from router.errors import (
    BadRequest,
    ConnectTimeout,
    Overdue,
    RouterError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.metrics import Metrics
from router.records.record import Try
from router.replicas.fleet import Fleet
from router.replicas.ledger import Lease
from router.replicas.retry_budget import RetryBudget
from router.request.decide import candidates_for
from router.request.job import Job, Placement
from router.request.read import extra_keys
from router.request.verify import PoolVerifier
from router.request.witness import Witness

logger = logging.getLogger(__name__)

_NOT_SENT: Final = frozenset({UpstreamUnreachable.code, ConnectTimeout.code})
UNLOADED: Final = "adapter_unloaded"
"""A 404 of a replica that has unloaded the adapter; see router.discovery.served_models."""

SET_ASIDE: Final = "set_aside"
"""A 503 of a replica that is paused or scales; see router.request.forward."""

NOT_PROCESSED: Final = _NOT_SENT | {"status_503", UNLOADED, SET_ASIDE}
"""Failures that say that nothing was computed: the request may move on any number of times."""

_POOL_MAY_FAIL: Final = frozenset({"status_500", "event_500"})
"""What vLLM makes of a read from the pool that failed."""

Failures = list[tuple[Lease, str]]
"""The tries of a request that failed, first one first, and how."""


class Retries:
    """Judges failed tries.

    Args:
        pool: None: there is no shared pool, so no failure can be its.
    """

    def __init__(
        self,
        config: ForwardConfig,
        *,
        fleet: Fleet,
        pool: PoolVerifier | None,
        witness: Witness,
        metrics: Metrics,
    ) -> None:
        self.witness = witness
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._metrics = metrics
        self._budget = RetryBudget(config.retry_ratio)

    def note_request(self) -> None:
        """Count a request: the budget is a share of them."""
        self._budget.note_request(monotonic())

    def objection(self, job: Job, placement: Placement, failure: str) -> str | None:
        """Return why a failed try may not be followed by one more elsewhere; None: it may."""
        if self.witness.refusal(job) is not None:
            return "kills"
        if failure not in _NOT_SENT:
            if job.has_side_effects:
                return "side_effects"
            if len(job.tried) >= self._config.max_tries:
                return "max_tries"
            if failure not in NOT_PROCESSED and any(
                t.failure is not None and t.failure not in NOT_PROCESSED for t in job.tries
            ):
                return "sent_twice"
        now_s = monotonic()
        try:
            candidates_for(self._fleet, job, now_s)
        except RouterError:
            return "no_replica"
        name, begun_s = placement.candidate.replica.name, placement.lease.begun_s
        if failure in _NOT_SENT or self._budget.can_take(name, begun_s, now_s):
            return None
        return "budget"

    def may_move_on(self, job: Job, placement: Placement) -> bool:
        """Return whether a try that gets no answer in time may be followed by one more."""
        return self.objection(job, placement, UpstreamTimeout.code) is None

    def judge(
        self, job: Job, placement: Placement, failure: str | None, failed: Failures
    ) -> str | None:
        """Note how a try ended; return why no other may follow if it failed, None: one may.

        `failed` is added to. A request that may go on without the pool is changed accordingly.
        """
        objection = self.objection(job, placement, failure) if failure else None
        if objection is not None and self._can_skip_pool(job, placement, failure):
            objection = None if self._skip_pool(job) else objection
        job.tries.append(Try(candidate=placement.candidate.id, failure=failure))
        if failure is not None:
            failed.append((placement.lease, failure))
            self.excuse(job, failed, objection)
            if placement.may_fetch and failure in _POOL_MAY_FAIL | {Overdue.code}:
                assert self._pool is not None
                self._pool.fetch_failed(placement.candidate.id, placement.lease.begun_s)
        return objection

    def excuse(self, job: Job, failed: Sequence[tuple[Lease, str]], objection: str | None) -> None:
        """Decide whose fault the last failure is, and take back what an earlier one counted.

        What fails at two replicas in the same way is the request's. Where no budget is left to
        try another replica, nothing is proven: else a flood of such requests would still do it.
        """
        if objection is not None:
            self._metrics.not_retried.labels(objection).inc()
        failure, before = failed[-1][1], failed[:-1]
        if failure in NOT_PROCESSED:
            return
        same = [other for other, its_failure in before if its_failure == failure]
        if same:
            self._fleet.absolve(same[-1], monotonic())
        if same or objection == "budget":
            job.is_excused = True
            self._metrics.absolved.labels("same_elsewhere" if same else "unproven").inc()

    def may_prefill_again(self, prefill: Placement, failure: str) -> bool:
        """Return whether a prompt that failed there may be computed at another replica; count it.

        From the same budget: else a pool of prefill replicas that fail is asked twice for all.
        """
        if failure in _NOT_SENT:
            return True
        name, begun_s = prefill.candidate.replica.name, prefill.lease.begun_s
        if not self._budget.can_take(name, begun_s, monotonic()):
            return False
        self.take(prefill)
        return True

    def take(self, placement: Placement) -> None:
        """Take from the budget: what failed there is sent again."""
        self._budget.take(placement.candidate.replica.name, placement.lease.begun_s, monotonic())

    def may_go_without_pool(self, job: Job) -> bool:
        """Make of a request one without the pool if that may still answer it; False: nothing may.

        For one that may be sent again, and whose other replicas have gone out meanwhile.
        """
        return self._pool_may_have_failed(job) and self._skip_pool(job)

    async def move_on(self, job: Job, placement: Placement, failed: Failures) -> None:
        """Leave a replica at which the last try failed, after a pause where that helps."""
        name, failure = placement.candidate.replica.name, failed[-1][1]
        self._metrics.failovers.labels(name, failure).inc()
        logger.warning(
            "retried on another replica before the first byte",
            extra={"request": job.request_id, "replica": name, "reason": failure},
        )
        if failure in _NOT_SENT:
            return
        self.take(placement)
        if failure != Overdue.code:  # it waited enough
            pause_s = self._config.retry_backoff_s * 2.0 ** (len(failed) - 1)
            await asyncio.sleep(random.uniform(0.0, pause_s))

    # ---------------------------------------------------------------- without the pool

    def _can_skip_pool(self, job: Job, placement: Placement, failure: str | None) -> bool:
        """Return whether a failure may be the pool's, and computing everything may help."""
        if not self._pool_may_have_failed(job, failure):
            return False
        if failure in _NOT_SENT:
            return True  # the failure before it, which may be the pool's, is counted
        name, begun_s = placement.candidate.replica.name, placement.lease.begun_s
        return self._budget.can_take(name, begun_s, monotonic())

    def _pool_may_have_failed(self, job: Job, failure: str | None = None) -> bool:
        """Return whether a try, or the last one's `failure`, may be a read that failed."""
        if self._pool is None or job.prompt is None or job.skips_pool:
            return False
        return any(f in _POOL_MAY_FAIL for f in (failure, *(t.failure for t in job.tries)))

    def _skip_pool(self, job: Job) -> bool:
        """Make of a request one that no cache has anything of; False if its body cannot be one.

        Until the master drops what a dead engine held (10 s), every replica that looks there finds
        the objects and fails to read them (`kv_load_failure_policy: fail`). There is no field to
        forbid a read; under a salt of its own a prompt's blocks have other names.
        """
        salt = secrets.token_hex(8)
        try:
            body = with_fields(job.inbound.body or b"{}", {"cache_salt": salt})
        except BadRequest:  # it has the field too often
            return False
        job.inbound = replace(job.inbound, body=body)
        job.extra, job.chains, job.found = extra_keys(self._fleet, job.model or "", salt), {}, {}
        job.skips_pool = job.is_excused = True
        self._metrics.pool_skipped.inc()
        try:
            candidates_for(self._fleet, job, monotonic())
        except RouterError:
            job.tried.clear()
        return True
