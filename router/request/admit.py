"""Admit: a decision takes effect. From here on a request's load and its blocks count.

Unless its tenant's tokens are spent. A request that has to wait does so before, and is matched and
decided by the caches of the moment it leaves: see `wait`. So `admit` is synchronous.

What a request holds (load, claim on blocks) is given back by `release`, however it ends.
"""

from __future__ import annotations

import random
from time import monotonic

from msgspec.structs import replace

from router.cluster.outbox import Outbox
from router.index.cache_view import CacheView
from router.index.claim import Claim
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.replicas.conversations import Conversations
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.request import tenancy
from router.request.job import Choice, Job, Placement
from router.request.verify import PoolVerifier
from router.scheduling.classes import BATCH
from router.upstream import Answer


class Admission:
    """Books requests where they are sent, and publishes that to other routers."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        sessions: Conversations,
        outbox: Outbox | None,
        pool: PoolVerifier | None,
        metrics: Metrics,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._sessions = sessions
        self._outbox = outbox
        self._pool = pool
        self._decisions = metrics.decisions

    def admit(self, job: Job, choice: Choice) -> Placement:
        """Book a request at its candidate, and claim the blocks that it will compute there.

        Raises:
            RateLimited: its tenant has not so many tokens left this minute.
        """
        now_s = monotonic()
        plan = choice.plan
        elsewhere = plan.choice if plan is not None else None
        tenancy.charge(job, elsewhere or choice, now_s)
        prefill = self._book(job, elsewhere, now_s) if elsewhere is not None else None
        placement = self._book(job, choice, now_s, prefill=prefill)
        job.tried.add(choice.candidate.replica.name)
        job.placed_s = monotonic()
        return placement

    def prefill_again(self, job: Job, placement: Placement, choice: Choice) -> Placement:
        """Book a prompt at another prefill replica: the first failed and has given it back.

        The request's plan says so from now on. Its tenant has paid.
        """
        assert placement.plan is not None
        placement.plan = replace(placement.plan, choice=choice)
        placement.prefill = self._book(job, choice, monotonic())
        return placement.prefill

    def rebook(
        self, job: Job, placement: Placement, choice: Choice, *, is_sent: bool = False
    ) -> None:
        """Book a request anew where it is: its prompt is computed elsewhere by now, or was not.

        So its time there begins now, and what it reads and computes is what is known now.
        `is_sent`: all of its prompt comes from the replica that computed it.
        """
        now_s, old = monotonic(), placement.lease
        self._fleet.end(old, now_s, Outcome.CLIENT_GONE)  # counts neither way
        booking = _booking(job, choice, is_session=True)
        if is_sent:
            booking = booking.sent(choice.view.num_gpu_tokens)
        placement.lease = self._fleet.admit(placement.candidate.id, booking, now_s)
        placement.claim = self._claim(job, choice)
        if self._outbox is not None:
            self._outbox.ended(old, computed=False)
            self._publish(job, placement.lease, placement.claim, choice, is_session=True)
        _predict(job, placement, choice)
        if self._pool is not None and choice.num_pool_tokens:
            self._pool.begins_fetch(placement.candidate.id)

    def _book(
        self, job: Job, choice: Choice, now_s: float, *, prefill: Placement | None = None
    ) -> Placement:
        """Book a request, or its prompt alone, at a candidate."""
        candidate = choice.candidate
        is_prompt = candidate.replica.role == "prefill"
        if prefill is not None:  # until its prompt is there, it only has its place
            booking = Booking(
                num_uncached_tokens=0,
                num_cached_tokens=job.num_tokens,
                streams=False,
                session_hash=job.session_hash,
                is_batch=job.service_class == BATCH,
            )
        else:
            booking = _booking(job, choice, is_session=not is_prompt)
            if is_prompt:
                booking = replace(booking, streams=True)  # the whole answer is its first token
        lease = self._fleet.admit(candidate.id, booking, now_s)
        claim = self._claim(job, choice) if prefill is None else None
        if self._outbox is not None:
            self._publish(job, lease, claim, choice, is_session=not is_prompt)
        if self._pool is not None and choice.num_pool_tokens and prefill is None:
            self._pool.begins_fetch(candidate.id)
        state = self._caches.state(candidate.id)
        self._decisions.labels(choice.policy.name, state).inc()
        placement = Placement(
            candidate=candidate,
            decision=choice.decision,
            snapshot=choice.snapshot,
            policy=choice.policy,
            assignment=choice.assignment,
            lease=lease,
            claim=claim,
            num_gpu_tokens=0,
            num_cpu_tokens=0,
            state=state,
            plan=choice.plan,
            prefill=prefill,
        )
        _predict(job, placement, choice)
        return placement

    def _claim(self, job: Job, choice: Choice) -> Claim | None:
        """Claim the blocks that a candidate will compute or read."""
        candidate = choice.candidate
        contract = self._caches.contract(candidate.id)
        if job.tokens is None or contract is None or not job.is_placed_at(candidate):
            return None
        keys = job.keys(contract)
        num_held_blocks = min(choice.view.num_gpu_tokens // contract.block_size, len(keys))
        return self._caches.claim(candidate.id, keys, num_held_blocks, job.num_tokens)

    def _publish(
        self, job: Job, lease: Lease, claim: Claim | None, choice: Choice, *, is_session: bool
    ) -> None:
        """Note a request for other routers."""
        assert self._outbox is not None
        contract = self._caches.contract(lease.candidate)
        size = contract.block_size if contract is not None else 1
        self._outbox.began(
            lease,
            claim=claim,
            num_held_blocks=choice.view.num_gpu_tokens // size if claim is not None else 0,
            session_hash=job.session_hash if is_session else None,
            has_named_session=job.has_named_session,
        )

    def prefilled(self, placement: Placement) -> None:
        """Note that a prompt has been computed where it was sent for that."""
        now_s = monotonic()
        self._fleet.first_token(placement.lease, now_s)
        if self._outbox is not None:
            self._outbox.answered(placement.lease, now_s)
        if self._pool is not None and placement.num_pool_tokens:
            self._pool.fetched(placement.candidate.id, placement.lease.begun_s)

    def answered(self, job: Job, placement: Placement, answer: Answer) -> None:
        """Note the first token of an answer, if it has come."""
        is_prompt = job.prompt is not None
        if is_prompt and job.session_hash is not None and answer.outcome_status == 200:
            self._sessions.computed(job.session_hash, placement.candidate.id, job.num_tokens)
        is_all = job.num_prompts == 1  # a batch's first token is that of one of its prompts
        if job.streams and is_all and answer.outcome_status == 200 and answer.first_s is not None:
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

    def abandon(self, placement: Placement) -> None:
        """Give back a request that was booked and is not sent."""
        for each in (placement, placement.prefill):
            if each is not None:
                self.release(each, Outcome.CLIENT_GONE)

    def absolve(self, lease: Lease) -> None:
        """Take back what a request's failure counted against its replica."""
        self._fleet.absolve(lease, monotonic())


def _booking(job: Job, choice: Choice, *, is_session: bool) -> Booking:
    """Write what a request adds to the load of the candidate that computes it."""
    view = choice.view
    num_pool = choice.num_pool_tokens
    num_cached = max(view.num_gpu_tokens, view.num_cpu_tokens) + num_pool
    is_prompt = job.prompt is not None
    return Booking(
        num_uncached_tokens=max(job.num_tokens - num_cached, 0) + job.num_more_tokens
        if is_prompt
        else 0,
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - view.num_gpu_tokens,
        is_from_pool=num_pool > 0,
        num_disk_tokens=choice.num_disk_tokens if num_pool else 0,
        streams=job.streams and is_prompt and job.num_prompts == 1,  # else its time teaches nothing
        session_hash=job.session_hash if is_prompt and is_session else None,
        is_batch=job.service_class == BATCH,
        num_prompts=job.num_prompts,
    )


def _predict(job: Job, placement: Placement, choice: Choice) -> None:
    """Set what is predicted to be reused of a prompt; nothing, if that is a guess."""
    view = choice.view
    num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
    placement.is_guess = choice.is_guess
    placement.num_gpu_tokens = 0 if choice.is_guess else view.num_gpu_tokens
    placement.num_cpu_tokens = 0 if choice.is_guess else num_own - view.num_gpu_tokens
    placement.num_pool_tokens = choice.num_pool_tokens
    placement.num_in_pool = choice.view.num_pool_tokens
