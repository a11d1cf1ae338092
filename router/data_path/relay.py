"""Relay: an answer on its way to the client, byte for byte; a stream goes on if its engine dies.

After the first byte no other replica can answer instead, but one can go on: with a stream whose
terms allow it, from the tokens that its client has. Else a stream's client gets an error event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol

from msgspec import Struct
from multidict import CIMultiDict

from router.api.body_fields import with_fields
from router.api.failures import error_event
from router.api.opening import Begun, ends_with_error, opening_of
from router.api.usage import TAIL_BYTES, Usage
from router.data_path.admit import Admission
from router.data_path.continuation import Continuation, is_whole
from router.data_path.headers import answer_headers
from router.data_path.job import Job, Placement
from router.data_path.retry import Failures, Retries
from router.data_path.terms import NotContinued, Terms
from router.data_path.tokenize import Tokenizer
from router.errors import BadRequest, RouterError, UpstreamBroken, UpstreamError
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.records.record import Try
from router.upstream import Answer

logger = logging.getLogger(__name__)

_LEFT: Final = (ConnectionError, asyncio.CancelledError)
"""How it shows that a client has left. Some do with the last event, before the stream's end."""

_MOST_TAIL_BYTES: Final = 4 * TAIL_BYTES

Send = Callable[[Job], Awaitable[tuple[Placement, Answer]]]
"""Places a request and forwards it, as the pipeline does."""


class Reply(Protocol):
    """Where the answer goes: the client's connection."""

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer; `is_own`: no engine gave it."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""

    async def keep_alive(self, every_s: float) -> None:
        """Write a comment to a stream's client after each silence of so long; runs on."""

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once; wait for a client that is behind."""

    def put(self, chunk: bytes) -> bool:
        """Send the next piece, at once; False: the client is behind, see `catch_up`.

        Raises:
            ConnectionError: the client has left.
        """

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""


class Passage(Struct, kw_only=True):
    """An answer that has begun, and whose it is now.

    first_s: When its first token came, or what there is instead (`Answer.first_s`); None: not yet.
    """

    job: Job
    placement: Placement
    answer: Answer
    first_s: float | None
    last_usage: Usage | None = None  # of a stream whose client left with its last event
    is_released: bool = False  # what it holds of its replica has been given back
    failed: Failures = []  # what earlier parts of it failed at, and how


class Relay:
    """Hands answers on."""

    def __init__(
        self, *, tokenizer: Tokenizer, retries: Retries, admission: Admission, metrics: Metrics
    ) -> None:
        self._tokenizer = tokenizer
        self._retries = retries
        self._admission = admission
        self._metrics = metrics

    async def pass_through(self, passage: Passage, reply: Reply, send: Send) -> Usage | None:
        """Hand the answer on, and read its usage.

        Args:
            send: For another replica that goes on with it.

        Raises:
            UpstreamBroken, UpstreamTimeout: it broke off; a stream's client has got an error event.
        """
        job, answer = passage.job, passage.answer
        headers = answer_headers(job, passage.placement, answer)
        terms = job.terms if answer.is_event_stream and answer.outcome_status == 200 else "status"
        is_cut = isinstance(terms, Terms) and not is_whole(answer.first)
        if answer.complete and not is_cut:
            await reply.send(answer.status, headers, answer.first)
            if answer.status != 200 or job.prompt is None:
                return None
            # A short stream is here as a whole, too.
            api = job.inbound.api
            read = api.usage_of_stream if answer.is_event_stream else api.usage_of_body
            return read(answer.readable)
        await reply.start(answer.status, headers)
        if isinstance(terms, Terms):
            stream = Continuation(terms)
            try:
                return await self._stream(passage, reply, stream, send)
            except _LEFT:
                passage.last_usage = stream.usage if stream.is_whole else None
                raise
        tail = bytearray(answer.first)
        note = _noting(passage)
        note(answer.first)

        def take(chunk: bytes) -> bool:
            note(chunk)
            is_taken = reply.put(chunk)
            if passage.first_s is None and opening_of(chunk) is Begun.CONTENT:
                passage.first_s = answer.first_s = monotonic()
                self._admission.answered(job, passage.placement, answer)
            tail.extend(chunk)
            if len(tail) > _MOST_TAIL_BYTES:  # now and then: moving it for each event is slow
                del tail[:-TAIL_BYTES]
            return is_taken

        try:
            await reply.write(answer.first)
            while not answer.complete:
                await answer.pour(take)
                await reply.catch_up()
        except UpstreamError as exc:
            if answer.is_event_stream:
                self._metrics.continuations.labels("refused", str(terms)).inc()
                with suppress(ConnectionError):  # the client may be gone as well
                    await reply.write(error_event(exc, job.inbound.path))
            raise
        except _LEFT:
            if job.inbound.api.end in tail:
                passage.last_usage = _usage_at_the_end(job, tail)
            raise
        if answer.is_event_stream and ends_with_error(bytes(tail[-TAIL_BYTES:])):
            await self._retries.witness.lost(job, passage.placement, "event_500", is_answered=True)
        return _usage_at_the_end(job, tail)

    def release(self, passage: Passage, outcome: Outcome) -> None:
        """Give back what an answer holds, once."""
        if not passage.is_released:
            passage.is_released = True
            self._admission.release(passage.placement, outcome)

    async def _stream(
        self, passage: Passage, reply: Reply, stream: Continuation, send: Send
    ) -> Usage | None:
        """Hand a stream on; where its engine dies, another replica goes on with it.

        Raises:
            UpstreamBroken, UpstreamTimeout: none does; the client has got an error event.
        """
        job = passage.job
        broken: UpstreamError | None = None
        failure = b""
        while True:
            try:
                try:
                    await self._hand_on(passage, stream, reply)
                    return stream.usage
                except UpstreamError as exc:
                    broken, failure = exc, stream.failure
                    end = await self._go_on(job, passage, stream, send, exc)
                if end is not None:
                    await reply.write(end)
                    return stream.usage
            except NotContinued as exc:
                assert broken is not None  # what comes from the first engine is not judged
                self.release(passage, Outcome.CLIENT_GONE)  # unless it is the one that broke off
                self._metrics.continuations.labels("refused", exc.reason).inc()
                with suppress(ConnectionError):  # the client may be gone as well
                    await reply.write(failure or error_event(broken, job.inbound.path))
                raise broken from exc

    async def _hand_on(self, passage: Passage, stream: Continuation, reply: Reply) -> None:
        """Hand on one engine's part of a stream.

        Raises:
            UpstreamError: it broke off, or said itself that it has failed.
            NotContinued: it does not go on with the answer that it was given.
        """
        answer, name = passage.answer, passage.placement.candidate.replica.name
        note = _noting(passage)
        note(answer.first)

        def take(chunk: bytes) -> bool:
            note(chunk)
            whole = stream.feed(chunk)
            is_taken = reply.put(whole) if whole else True
            return is_taken and not stream.failure

        whole = stream.feed(answer.first)
        if whole:
            await reply.write(whole)
        while not stream.failure and not answer.complete:
            await answer.pour(take)
            await reply.catch_up()
        if stream.failure:
            raise UpstreamBroken(name, f"replica {name} reported an error inside its answer")
        if not stream.is_whole:
            raise UpstreamBroken(name, f"replica {name} ended its answer early")
        rest = stream.end()
        if rest:
            await reply.write(rest)

    async def _go_on(
        self, job: Job, passage: Passage, stream: Continuation, send: Send, error: UpstreamError
    ) -> bytes | None:
        """Have another replica go on with a stream that broke off.

        Returns the stream's end instead, where its client has every token already.

        Raises:
            NotContinued: it ends here.
        """
        placement, name = passage.placement, passage.placement.candidate.replica.name
        passage.answer.close()
        self.release(passage, Outcome.REPLICA_FAILED)
        await self._retries.witness.lost(job, placement, error.code, is_answered=True)
        objection = self._retries.objection(job, placement, error.code)
        job.tries[-1] = Try(candidate=placement.candidate.id, failure=error.code)
        passage.failed.append((placement.lease, error.code))
        self._retries.excuse(passage.job, passage.failed, objection)
        transcript = stream.check()
        if transcript.finish_reason is not None and not stream.lacks_usage:
            return self._concluded(stream.conclusion(), passage, error)
        prompt_ids, ids = await self._tokenizer.lengthen(job, name, transcript, stream.terms)
        if stream.is_spent(len(ids)):
            end = stream.conclusion(num_prompt_tokens=len(prompt_ids), num_text_tokens=len(ids))
            return self._concluded(end, passage, error)
        if objection is not None:
            raise NotContinued(objection)
        self._retries.take(placement)
        assert job.inbound.body is not None
        try:
            body = with_fields(job.inbound.body, stream.resume(prompt_ids, ids))
        except BadRequest as exc:  # it repeats a key
            raise NotContinued("field") from exc
        continued = self._tokenizer.continued(job, [*prompt_ids, *ids], len(ids), body)
        try:
            placement, answer = await send(continued)
        except RouterError as exc:
            raise NotContinued("no_replica") from exc
        if answer.outcome_status != 200 or not answer.is_event_stream:
            answer.close()
            self._admission.release(placement, Outcome.of_status(answer.outcome_status))
            raise NotContinued("status")
        self._note_continuation("continued", passage, error)
        self._admission.answered(continued, placement, answer)  # the client's was long ago
        passage.job, passage.placement, passage.answer = continued, placement, answer
        passage.is_released = False
        return None

    def _concluded(self, end: bytes, passage: Passage, error: UpstreamError) -> bytes:
        self._note_continuation("concluded", passage, error)
        return end

    def _note_continuation(self, result: str, passage: Passage, error: UpstreamError) -> None:
        self._metrics.continuations.labels(result, error.code).inc()
        logger.warning(
            "continued a failed stream",
            extra={
                "request": passage.job.request_id,
                "replica": passage.placement.candidate.replica.name,
                "reason": error.code,
                "result": result,
            },
        )


def _noting(passage: Passage) -> Callable[[bytes], None]:
    """Return what counts a stream's events, about one a token, for what it takes of a cache."""
    claim = passage.placement.claim
    use = claim.use if claim is not None else None
    if use is None or not passage.answer.is_event_stream:
        return _ignore
    answered = use.answered
    return lambda chunk: answered(chunk.count(b"\n\n"))


def _ignore(chunk: bytes) -> None:
    """Count nothing."""


def _usage_at_the_end(job: Job, tail: bytearray) -> Usage | None:
    if job.prompt is None:
        return None
    return job.inbound.api.usage_of_stream(bytes(tail[-TAIL_BYTES:]))
