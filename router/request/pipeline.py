"""The way of a request, top to bottom. Each step is a file of this room; the rest are its tools.

    1 read       bytes -> JSON -> model, session, prompt               read.py
    2 tokenize   the prompt's token ids, only what is new              tokenize.py
    3 match      the chain, in each candidate's own contract; how      match.py
                 much of it each candidate and the shared pool hold
    4 verify     what would be fetched from the pool: is it there?     verify.py
    5 decide     snapshot -> pure policy -> candidate                  decide.py
    6 admit      wait for room where that is on; a lease: its load     wait.py, admit.py
                 counts from here
      prefill    where prompts are computed apart: have it done       split.py, prefill.py
    7 forward    bytes through; before the first byte, fail over       forward.py, retry.py
                 and the answer back, to its last byte                 relay.py
    8 observe    first token, usage, audit, record                     observe.py

From match to admit it is one synchronous step: nothing changes between the look-up and the lease.
Verifying waits for the pool's master, so it follows a first decision, and the step is taken anew;
so it is for a request that has waited.
The lease and the claim on blocks belong to the request and end with it, however it ends.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from msgspec import Struct

from router.api.anthropic import counted_body
from router.api.apis import APIS
from router.api.usage import Usage
from router.discovery.served_models import ServedModels
from router.errors import (
    ConnectTimeout,
    NoReplicaAvailable,
    OutOfConnections,
    ResponseNotFound,
    RouterError,
    UpstreamError,
    UpstreamUnreachable,
)
from router.records.outcome import Outcome
from router.request import tenancy
from router.request.admit import Admission
from router.request.decide import Decider
from router.request.forward import Attempt, Forwarder
from router.request.headers import counted_headers
from router.request.job import Choice, Inbound, Job, Placement
from router.request.match import Matcher
from router.request.observe import Observer
from router.request.owners import Owners
from router.request.prefill import Prefill
from router.request.read import Reader
from router.request.relay import Passage, Relay, Reply
from router.request.retry import NOT_PROCESSED, Failures, Retries
from router.request.service import keepalive_s_of
from router.request.tokenize import Tokenizer
from router.request.turns import Turns
from router.request.verify import PoolVerifier
from router.request.wait import WaitingRoom
from router.upstream import Answer

CLIENT_LEFT: Final = 499
"""Status in records for a client that did not wait (nginx's number; no client is sent it)."""


class Steps(Struct, frozen=True, kw_only=True):
    """The steps of a request, in their order; and what several of them use."""

    turns: Turns
    reader: Reader
    models: ServedModels
    owners: Owners
    tokenizer: Tokenizer
    matcher: Matcher
    verifier: PoolVerifier | None  # None: there is no shared pool
    decider: Decider
    room: WaitingRoom
    admission: Admission
    prefill: Prefill
    forwarder: Forwarder
    retries: Retries
    relay: Relay
    observer: Observer


class Pipeline:
    """Routes requests. All state it changes sits in its steps.

    Args:
        early_stream_s: After what silence a stream's client gets a comment, unless it asks for
            another one; None: never.
    """

    def __init__(self, steps: Steps, *, early_stream_s: float | None = None) -> None:
        self.steps = steps
        self._early_stream_s = early_stream_s
        self._ends = Turns()  # of their own: no answer waits behind requests that have just come

    async def route(self, inbound: Inbound, reply: Reply, request_id: str) -> None:
        """Answer one request.

        Raises:
            RouterError: the caller answers in the API's own shape, if nothing was sent yet.
        """
        digest = await self.steps.retries.witness.check(inbound)
        job = await self.prepare(inbound, request_id)  # 1, 2, and of 3 what may wait
        job.received, job.digest = inbound, digest
        if job.num_counted_tokens is not None:
            body = counted_body(job.num_counted_tokens)
            await reply.send(200, counted_headers(job), body, is_own=True)
            self.steps.observer.counted(job)
            return
        job.drop_content()
        job.tokenized_s = monotonic()
        if job.streams:
            job.keepalive_s = keepalive_s_of(inbound.headers)
            if job.keepalive_s is None and inbound.api in APIS.values():
                job.keepalive_s = self._early_stream_s
        if job.keepalive_s is None:
            await self._answer(job, reply)
            return
        error: Exception | None = None
        async with asyncio.TaskGroup() as tg:
            comments = tg.create_task(reply.keep_alive(job.keepalive_s), name="comments")
            try:
                await self._answer(job, reply)
            except (RouterError, ConnectionError) as exc:
                error = exc
            finally:
                comments.cancel()
        if error is not None:
            raise error

    async def _answer(self, job: Job, reply: Reply) -> None:
        """Send a request, and hand its answer on.

        Raises:
            RouterError: there is none, or it broke off.
        """
        try:
            placement, answer = await self._send(job)
        except RouterError:
            tenancy.refund(job, monotonic())
            raise
        self.steps.admission.answered(job, placement, answer)
        self.steps.owners.note(job, placement, answer)
        passage = Passage(job=job, placement=placement, answer=answer, first_s=answer.first_s)
        outcome = Outcome.CLIENT_GONE  # unless it gets to the end
        usage: Usage | None = None
        try:
            usage = await self.steps.relay.pass_through(passage, reply)  # 7
            outcome = Outcome.of_status(passage.answer.outcome_status)
            await self._ends.take()
        except UpstreamError as exc:
            outcome = Outcome.REPLICA_FAILED
            witness = self.steps.retries.witness
            await witness.lost(passage.job, passage.placement, exc.code, is_answered=True)
            raise
        finally:
            if passage.last_usage is not None:
                usage = passage.last_usage
                outcome = Outcome.of_status(passage.answer.outcome_status)
            self._finish(passage, outcome, usage)  # 8

    async def prepare(self, inbound: Inbound, request_id: str) -> Job:
        """Find all that placing a request needs to know of it.

        Raises:
            RouterError: it is refused.
        """
        steps = self.steps
        await steps.turns.take()
        job = await steps.reader.read(inbound, request_id)
        if job.model and not steps.reader.knows(job.model):
            await steps.models.look_for(job.model)
            steps.reader.name_blocks(job)
        await steps.owners.find(job)
        if inbound.api.counts:
            await steps.tokenizer.count(job)
            job.pass_through()
        if job.prompt is not None:
            await steps.tokenizer.fill(job)
            await steps.matcher.prepare(job)
        steps.decider.assign(job)
        if steps.room.is_on(job):
            steps.room.read(job)
        return job

    async def choose(self, job: Job) -> Choice:
        """Match and decide; where the choice would fetch, see that the pool has it, and do it anew.

        Also where it could: what another candidate holds the pool has probably been given, too.

        Raises:
            UnknownModel, NoReplicaAvailable: no replica serves the model, or none that does is up.
        """
        decide = self.steps.decider.decide
        choice = decide(job)
        return decide(job) if await self._verified(job, choice) else choice

    async def _send(self, job: Job) -> tuple[Placement, Answer]:
        """Place and forward a request; until an answer's first byte, a failing replica is left.

        See `retry` for which failures another try may follow. The last try's answer is the
        client's, even if it is an error.

        Raises:
            RouterError: there is no answer.
        """
        steps = self.steps
        steps.retries.note_request()
        failed: Failures = []
        while True:
            await steps.turns.take()
            try:
                placement = await self._place(job)  # 3, 4, 5, 6
            except NoReplicaAvailable:
                if not steps.retries.may_go_without_pool(job):
                    raise
                continue
            attempt = await self._attempt(job, placement)  # 7
            objection = steps.retries.judge(job, placement, attempt.failure, failed)
            refused = steps.retries.witness.refusal(job) if objection is not None else None
            is_last = attempt.failure is None or objection is not None
            if attempt.answer is not None and is_last and refused is None:
                return placement, attempt.answer
            outcome = attempt.outcome(placement)
            steps.admission.release(placement, outcome)
            if job.is_excused:
                steps.admission.absolve(placement.lease)
            if attempt.answer is not None:
                attempt.answer.close()
            if objection is not None:
                last = refused or _last_word(job, attempt.error)
                self._note_unanswered(job, placement, last.status, outcome)
                raise last from attempt.error
            await steps.retries.move_on(job, placement, failed)

    async def _verified(self, job: Job, choice: Choice) -> bool:
        """Ask whether the pool has what a choice would fetch; False: there was nothing to ask."""
        verifier = self.steps.verifier
        if verifier is None or not (positions := verifier.due(choice)):
            return False
        await verifier.verify(job, choice, positions)
        return True

    async def _place(self, job: Job) -> Placement:
        """Choose and book; where requests wait, when there is room.

        Raises:
            RouterError: as `choose` and `Admission.admit`; QueueFull, DeadlineUnmet, TbtUnmet.
        """
        steps = self.steps
        if not steps.room.takes(job):
            placement = steps.admission.admit(job, await self.choose(job))
            steps.decider.count(job)
            return placement
        if steps.verifier is not None:
            await self._verified(job, steps.decider.decide(job))
        return await steps.room.place(job, self._left)

    def _left(self, job: Job, choice: Choice | None) -> None:
        """Record a request whose client left while it waited, if it is known where it would go."""
        now_s = monotonic()
        tenancy.refund(job, now_s)
        if choice is not None:
            self.steps.observer.left(job, choice, status=CLIENT_LEFT, now_s=now_s)

    async def _attempt(self, job: Job, placement: Placement) -> Attempt:
        """Forward a request once; where it ends here, it ends with a record."""
        witness, attempt = self.steps.retries.witness, None
        try:
            if placement.plan is not None:
                attempt = await self.steps.prefill.send(job, placement)
            else:
                attempt = await self.steps.forwarder.send(job, placement)
            if attempt.failure is not None and attempt.failure not in NOT_PROCESSED:
                await witness.lost(job, placement, attempt.failure)
            return attempt
        except BaseException as exc:  # the client left while we waited, or we can send nothing
            is_ours = isinstance(exc, OutOfConnections)
            if not is_ours:
                witness.left(job, placement)
            if attempt is not None and attempt.answer is not None:
                attempt.answer.close()
            outcome = Outcome.ROUTER_FAILED if is_ours else Outcome.CLIENT_GONE
            self.steps.admission.release(placement, outcome)
            status = exc.status if isinstance(exc, OutOfConnections) else CLIENT_LEFT
            self._note_unanswered(job, placement, status, outcome)
            raise

    def _note_unanswered(
        self, job: Job, placement: Placement, status: int, outcome: Outcome
    ) -> None:
        """Record a request that ended without a byte of an answer."""
        self.steps.observer.finished(
            job,
            placement,
            status=status,
            outcome=outcome,
            usage=None,
            first_s=None,
            now_s=monotonic(),
        )

    def _finish(self, passage: Passage, outcome: Outcome, usage: Usage | None) -> None:
        """Give back what a request holds, and record it."""
        steps, job, placement = self.steps, passage.job, passage.placement
        passage.answer.close()
        steps.retries.witness.answered(job, placement, outcome)
        steps.relay.release(passage, outcome)
        if job.is_excused:
            steps.admission.absolve(placement.lease)
        tenancy.settle(job, placement, passage.answer.status, usage, monotonic())
        steps.observer.finished(
            job,
            placement,
            status=passage.answer.status,
            outcome=outcome,
            usage=usage,
            first_s=passage.first_s,
            now_s=monotonic(),
        )


def _last_word(job: Job, error: UpstreamError | None) -> RouterError:
    """Return the error for the client; where nothing listens, one that says it may come back.

    But the response that a replica had issued will not.
    """
    assert error is not None  # an answer is handed on
    if not isinstance(error, UpstreamUnreachable | ConnectTimeout):
        return error
    if job.owner is not None and job.response_id is not None:
        return ResponseNotFound(job.response_id)
    return NoReplicaAvailable(f"No replica can take a request now: {error.message}.")
