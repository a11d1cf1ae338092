"""Admit: a decision takes effect. From here on a request's load and its blocks count.

Unless its tenant's tokens are spent. A request that has to wait does so before, and is matched and
decided by the caches of the moment it leaves: see `wait`. So `admit` is synchronous.

What a request holds (load, claim on blocks) is given back by `release`, however it ends.
"""

from __future__ import annotations

import random
from time import monotonic

from router.cluster.outbox import Outbox
from router.data_path import tenancy
from router.data_path.job import Choice, Job, Placement
from router.data_path.verify import PoolVerifier
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.replicas.sessions import Sessions
from router.upstream import Answer


class Admission:
    """Books requests where they are sent, and publishes that to other routers."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        sessions: Sessions,
        outbox: Outbox | None,
        pool: PoolVerifier | None,
        metrics: Metrics,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._sessions = sessions
        self._outbox = outbox
        self._pool = pool
        self._metrics = metrics

    def admit(self, job: Job, choice: Choice) -> Placement:
        """Book a request at its candidate, and claim the blocks that it will compute there.

        Raises:
            RateLimited: its tenant has not so many tokens left this minute.
        """
        now_s = monotonic()
        tenancy.charge(job, choice, now_s)
        candidate, view = choice.candidate, choice.view
        num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
        num_cached = num_own + choice.num_pool_tokens
        booking = Booking(
            num_uncached_tokens=max(job.num_tokens - num_cached, 0) if job.prompt else 0,
            num_cached_tokens=num_cached,
            num_fetched_tokens=num_cached - view.num_gpu_tokens,
            is_from_pool=choice.num_pool_tokens > 0,
            streams=job.streams and job.prompt is not None,  # else its time teaches nothing
            session_hash=job.session_hash if job.prompt is not None else None,
        )
        lease = self._fleet.admit(candidate.id, booking, now_s)
        contract = self._caches.contract(candidate.id)
        claim = None
        num_held_blocks = 0
        if job.tokens is not None and contract is not None and job.is_placed_at(candidate):
            num_held_blocks = view.num_gpu_tokens // contract.block_size
            claim = self._caches.claim(candidate.id, job.keys(contract), num_held_blocks)
        if self._outbox is not None:
            self._outbox.began(
                lease,
                claim=claim,
                num_held_blocks=num_held_blocks,
                session_hash=job.session_hash,
                has_named_session=job.has_named_session,
            )
        if job.session_hash is not None:
            self._sessions.note(job.session_hash, candidate.id, now_s)
        if self._pool is not None and choice.num_pool_tokens:
            self._pool.begins_fetch(candidate.id)
        state = self._caches.state(candidate.id)
        is_known = job.tokens is not None  # else a guess, good enough for choosing
        self._metrics.decisions.labels(choice.policy.name, state).inc()
        job.tried.add(candidate.replica.name)
        job.placed_s = monotonic()
        return Placement(
            candidate=candidate,
            decision=choice.decision,
            snapshot=choice.snapshot,
            policy=choice.policy,
            assignment=choice.assignment,
            lease=lease,
            claim=claim,
            num_gpu_tokens=view.num_gpu_tokens if is_known else 0,
            num_cpu_tokens=num_own - view.num_gpu_tokens if is_known else 0,
            num_pool_tokens=choice.num_pool_tokens,
            state=state,
        )

    def answered(self, job: Job, placement: Placement, answer: Answer) -> None:
        """Note the first token of an answer, if it has come."""
        if job.session_hash is not None and answer.outcome_status == 200:
            self._sessions.computed(job.session_hash, placement.candidate.id, job.num_tokens)
        if job.streams and answer.outcome_status == 200 and answer.first_s is not None:
            self._fleet.first_token(placement.lease, answer.first_s)
            if self._outbox is not None:
                self._outbox.answered(placement.lease, answer.first_s)
            if self._pool is not None and placement.num_pool_tokens:
                self._pool.fetched(placement.candidate.id, placement.lease.begun_s)

    def release(self, placement: Placement, outcome: Outcome) -> None:
        """Give back what a request holds: its load, and its claim on blocks."""
        now_s = monotonic()
        self._fleet.end(placement.lease, now_s, outcome, jitter=random.random())
        computed = outcome is Outcome.OK
        if self._outbox is not None:
            self._outbox.ended(placement.lease, computed=computed)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=computed, now_s=now_s)

    def absolve(self, lease: Lease) -> None:
        """Take back what a request's failure counted against its replica."""
        self._fleet.absolve(lease, monotonic())
