"""The story of a request, from its first byte to its record.

    1 read      bytes -> model, session, what decides the prompt           read.py
    2 prompt    its token ids, computing only new text; its block keys     prompt.py, tokenize.py
    3 place     verify: ask a pool about the prompt, if that matters        fetch.py
                plan: look up who holds the prompt, ask the policy          place.py, match.py
                queue: wait until a replica has room                        queue.py
                commit: its load and its blocks count from here on
    4 send      bytes through; another replica if one fails in time         send.py, retry.py
                where prompts are computed apart, have that done first      prefill.py
    5 relay     the answer, byte for byte, to its end                       send.py
    6 record    observers are told; the decision record                     record.py

Between look-up and commit nothing is awaited, so nothing changes. What a request holds (load, claim
on blocks) is given back by `Place.end`, however the request ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Final, TypeVar

from msgspec import Struct

from router.api.answers import Usage
from router.api.anthropic import counted_body
from router.base.errors import (
    ConnectTimeout,
    NoReplicaAvailable,
    OutOfConnections,
    ResponseNotFound,
    RouterError,
    UpstreamError,
    UpstreamUnreachable,
)
from router.base.loop_turns import Turns
from router.records.record import Outcome, Try
from router.request.observer import Observers
from router.request.place import Place
from router.request.prefill import Prefill
from router.request.prompt import Owners, Prompts
from router.request.queue import WaitingRoom
from router.request.read import Reader
from router.request.record import Recorder, Settling
from router.request.results import Inbound, Passage, Placement, Plan, Prompt, Read, Sent, Tries
from router.request.retry import NO_DEATH, NO_ROUTE, NOT_PROCESSED, Retries, outcome_of
from router.request.send import Relay, Reply, RequestHeaders, Sender, counted_headers, early_headers

logger = logging.getLogger(__name__)

_Known = TypeVar("_Known")

CLIENT_LEFT: Final = 499
"""Status in records for a client that did not wait (nginx's number; no client is sent it)."""


class Steps(Struct, frozen=True, kw_only=True):
    """The steps of a request, in their order; and what several of them use."""

    turns: Turns
    reader: Reader
    prompts: Prompts
    place: Place
    queue: WaitingRoom
    sender: Sender
    prefill: Prefill
    relay: Relay
    recorder: Recorder
    owners: Owners
    retries: Retries
    observers: Observers
    settling: Settling
    headers: RequestHeaders


class Story:
    """Serves requests. Each step keeps its own state; this keeps none."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._ends = Turns()  # of their own: no answer waits behind requests that have just come

    async def serve(self, inbound: Inbound, reply: Reply, request_id: str) -> None:
        """Answer one request.

        Raises:
            RouterError: the caller answers in the API's own shape, if nothing was sent yet.
        """
        steps = self.steps
        tries = Tries(digest=await steps.retries.witness.check(inbound))
        await steps.turns.take()
        read = await self._read(inbound, request_id)
        if inbound.api.counts:
            num_tokens = await self._until_left(read, steps.prompts.count(read))
            if num_tokens is not None:
                await reply.send(200, counted_headers(read), counted_body(num_tokens), is_own=True)
                steps.recorder.counted(read, num_tokens)
                return
        prompt = await self._until_left(read, steps.prompts.of(read))
        del read  # its content is large, and an answer takes minutes
        keepalive_s = prompt.read.keepalive_s or steps.queue.keepalive_s(prompt, tries)
        if keepalive_s is None:
            await self._answer(prompt, tries, reply)
            return
        error: Exception | None = None
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as tg:

            def keep_alive() -> None:
                if not tasks:
                    keeping = reply.keep_alive(keepalive_s, lambda: self._early(prompt, tries))
                    tasks.append(tg.create_task(keeping, name="keep-alives"))

            if prompt.read.keepalive_s is None:
                tries.on_wait = keep_alive
            else:
                keep_alive()
            try:
                await self._answer(prompt, tries, reply)
            except Exception as exc:  # a group would wrap it
                error = exc
            finally:
                for task in tasks:
                    task.cancel()
        if error is not None:
            raise error

    def _early(self, prompt: Prompt, tries: Tries) -> Mapping[str, str]:
        """Return headers of a stream that begins before its answer does."""
        waiting = tries.waiting if tries.wait.released is None else None
        waits = self.steps.queue.describe(waiting) if waiting is not None else None
        return early_headers(prompt, tries, waits)

    async def prepare(self, inbound: Inbound, request_id: str) -> Prompt:
        """Find all that placing a request needs to know: for a dry run.

        Raises:
            RouterError: it is refused.
        """
        await self.steps.turns.take()
        return await self.steps.prompts.of(await self._read(inbound, request_id))

    async def _until_left(self, read: Read, step: Awaitable[_Known]) -> _Known:
        """Return what is found of a request that was read; its client may leave meanwhile."""
        try:
            return await step
        except asyncio.CancelledError:
            self._gone(read)
            raise

    async def _read(self, inbound: Inbound, request_id: str) -> Read:
        read = await self.steps.reader.read(inbound, request_id)
        self.steps.observers.read(read)
        return read

    async def _answer(self, prompt: Prompt, tries: Tries, reply: Reply) -> None:
        """Send a request, and pass its answer on.

        Raises:
            RouterError: there is no answer, or it broke off.
        """
        steps = self.steps
        passage = await self._sent(prompt, tries)
        placement, answer = passage.placement, passage.answer
        steps.place.answered(passage.prompt, placement, answer)
        if prompt.read.response_id is not None and prompt.owner is None:
            steps.owners.found(prompt.read, placement, answer)
        usage: Usage | None = None
        try:
            if prompt.read.is_kept:
                await steps.owners.record(prompt.read, placement, answer)
            usage = await steps.relay.pass_on(passage, reply)
            await self._ends.take()
        except UpstreamError as exc:
            passage.outcome = Outcome.REPLICA_FAILED
            witness = steps.retries.witness
            await witness.lost(prompt, tries, placement, exc.code, is_answered=True)
            raise
        finally:
            if passage.last_usage is not None:
                usage = passage.last_usage
            self._finish(passage, usage)

    async def _sent(self, prompt: Prompt, tries: Tries) -> Passage:
        """Place and send a request; leave a replica that fails before an answer's first byte.

        See `retry` for the failures that another try may follow. The last try's answer is the
        client's, even if it is an error.

        Raises:
            RouterError: there is no answer.
        """
        steps = self.steps
        steps.retries.note_request()
        last: Placement | None = None
        while True:
            try:
                placement = last = await self._placed(prompt, tries, last)
            except NoReplicaAvailable:
                resalted = steps.retries.resalted(prompt, tries)
                if resalted is None:
                    raise
                prompt = resalted
                continue
            sent, tried = await self._try(prompt, tries, placement), prompt
            if sent is None:
                steps.place.abandon(tries, placement)
                continue
            objection = refused = None
            if sent.failure is None:
                tries.records.append(Try(candidate=placement.lease.candidate))
            else:
                steps.observers.failed(prompt, placement, sent.failure)
                prompt, objection = steps.retries.judge(prompt, tries, placement, sent.failure)
                if objection is not None:
                    refused = steps.retries.witness.refusal(tries)
            is_last = sent.failure is None or (objection is not None and sent.failure != NO_ROUTE)
            if sent.answer is not None and is_last and refused is None:
                return Passage(
                    prompt=tried,
                    tries=tries,
                    placement=placement,
                    sent=sent,
                    answer=sent.answer,
                    first_s=sent.answer.first_s,
                )
            outcome = outcome_of(sent, placement)
            steps.place.end(placement, outcome)
            if tries.is_excused:
                steps.place.absolve(placement.lease)
            sent.close()
            if objection is not None:
                word = refused
                if word is None and sent.failure == NO_ROUTE:
                    word = steps.retries.last_word(prompt, tries)
                word = word or _last_word(prompt, sent.error)
                steps.recorder.finished(
                    prompt, tries, placement, status=word.status, outcome=outcome
                )
                raise word from sent.error
            try:
                await steps.retries.move_on(prompt, tries, placement)
            except asyncio.CancelledError:
                self._left(prompt, tries, last=placement)
                raise

    async def verify(self, prompt: Prompt, tries: Tries) -> None:
        """Verify what a request would fetch, if that could change where it goes.

        Raises:
            UnknownModel, NoReplicaAvailable: as `Place.plan`.
        """
        place = self.steps.place
        if place.fetches is None:
            return
        due = place.fetches.due(place.plan(prompt, tries))
        if due is not None:
            await place.fetches.verify(prompt, due)

    async def _placed(self, prompt: Prompt, tries: Tries, last: Placement | None) -> Placement:
        """Place a request: at once, or when a replica has room. `last`: where it was sent before.

        Raises:
            RouterError: as `Place.plan`, `Place.commit` and `WaitingRoom.place`.
        """
        steps = self.steps
        try:
            await steps.turns.take()
            await self.verify(prompt, tries)
        except asyncio.CancelledError:
            self._left(prompt, tries, last=last)
            raise
        if not steps.queue.takes(prompt, tries):
            return steps.place.commit(prompt, tries, steps.place.plan(prompt, tries))
        return await steps.queue.place(
            prompt, tries, on_left=lambda plan: self._left(prompt, tries, plan)
        )

    def _left(
        self,
        prompt: Prompt,
        tries: Tries,
        plan: Plan | None = None,
        *,
        last: Placement | None = None,
    ) -> None:
        """Record a request whose client left between its tries, or before the first one.

        Args:
            prompt: The request.
            tries: Its tries.
            plan: Where it would have gone. None: where it would go now.
            last: Where it was sent before.
        """
        steps = self.steps
        if last is not None:
            gone = Outcome.CLIENT_GONE
            steps.recorder.finished(prompt, tries, last, status=CLIENT_LEFT, outcome=gone)
            return
        try:
            plan = plan or steps.place.plan(prompt, tries)
        except RouterError:
            self._gone(prompt.read)
        else:
            steps.recorder.left(prompt, tries, plan, status=CLIENT_LEFT)

    def _gone(self, read: Read) -> None:
        """Tell observers of a client that left before there was anything to record."""
        logger.info("client left before a replica was chosen", extra={"request": read.request_id})
        self.steps.observers.refused(read.request_id, Outcome.CLIENT_GONE.value)

    async def _try(self, prompt: Prompt, tries: Tries, placement: Placement) -> Sent | None:
        """Send a request once; if it ends here, record that. None: as `Prefill.send`."""
        steps, witness = self.steps, self.steps.retries.witness
        sent: Sent | None = None
        try:
            if placement.plan.split is not None:
                sent = await steps.prefill.send(prompt, tries, placement)
            else:
                sent = await steps.sender.send(prompt, tries, placement)
            failure = sent.failure if sent is not None else None
            if failure is not None and failure not in NOT_PROCESSED | NO_DEATH:
                await witness.lost(prompt, tries, placement, failure)
            return sent
        except BaseException as exc:  # the client left while we waited, or we can send nothing
            is_ours = isinstance(exc, OutOfConnections)
            if not is_ours:
                witness.left(prompt, tries, placement)
            if sent is not None:
                sent.close()
            outcome = Outcome.ROUTER_FAILED if is_ours else Outcome.CLIENT_GONE
            steps.place.end(placement, outcome)
            status = exc.status if isinstance(exc, OutOfConnections) else CLIENT_LEFT
            steps.recorder.finished(prompt, tries, placement, status=status, outcome=outcome)
            raise

    def _finish(self, passage: Passage, usage: Usage | None) -> None:
        """Release what a request holds, and record it."""
        steps, tries, placement = self.steps, passage.tries, passage.placement
        status, outcome = passage.answer.status, passage.outcome
        passage.answer.close()
        steps.retries.witness.answered(tries, placement, outcome)
        steps.place.end(placement, outcome)
        if tries.is_excused:
            steps.place.absolve(placement.lease)
        steps.recorder.finished(
            passage.prompt,
            tries,
            placement,
            status=status,
            outcome=outcome,
            sent=passage.sent,
            usage=usage,
            first_s=passage.first_s,
        )


def _last_word(prompt: Prompt, error: UpstreamError | None) -> RouterError:
    """Return the error for the client. If nothing listens, it says that the client may come back.

    But the response that a replica had issued will not.
    """
    assert error is not None  # an answer is passed on
    if not isinstance(error, UpstreamUnreachable | ConnectTimeout):
        return error
    if prompt.owner is not None and prompt.read.response_id is not None:
        return ResponseNotFound(prompt.read.response_id)
    return NoReplicaAvailable(f"No replica can take a request now: {error.message}.")
