"""Relay an answer to the client, byte for byte.

No other replica can answer instead after the first byte. If the replica of a stream fails then, the
client gets an error event in the shape of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol

from msgspec import Struct
from multidict import CIMultiDict

from router.api.failures import error_event
from router.api.opening import Begun, ends_with_error, opening_of
from router.api.usage import TAIL_BYTES, Usage
from router.errors import UpstreamError
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.request.admit import Admission
from router.request.headers import answer_headers
from router.request.job import Job, Placement
from router.request.retry import Retries
from router.upstream import Answer

_LEFT: Final = (ConnectionError, asyncio.CancelledError)
"""How it shows that a client has left. Some do with the last event, before the stream's end."""

_MOST_TAIL_BYTES: Final = 4 * TAIL_BYTES


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
    """An answer that has begun.

    first_s: When its first token came, or what there is instead (`Answer.first_s`); None: not yet.
    """

    job: Job
    placement: Placement
    answer: Answer
    first_s: float | None
    last_usage: Usage | None = None  # of a stream whose client left with its last event
    is_released: bool = False  # what it holds of its replica has been given back


class Relay:
    """Hands answers on."""

    def __init__(self, *, retries: Retries, admission: Admission, metrics: Metrics) -> None:
        self._retries = retries
        self._admission = admission
        self._metrics = metrics

    async def pass_through(self, passage: Passage, reply: Reply) -> Usage | None:
        """Relay the answer, and read its usage.

        Raises:
            UpstreamBroken, UpstreamTimeout: it broke off; a stream's client got an error event.
        """
        job, answer = passage.job, passage.answer
        headers = answer_headers(job, passage.placement, answer)
        if answer.complete:
            await reply.send(answer.status, headers, answer.first)
            if answer.status != 200 or job.prompt is None:
                return None
            # A short stream is here as a whole, too.
            api = job.inbound.api
            read = api.usage_of_stream if answer.is_event_stream else api.usage_of_body
            return read(answer.readable)
        await reply.start(answer.status, headers)
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
            if len(tail) > _MOST_TAIL_BYTES:  # now and then: each move costs time
                del tail[:-TAIL_BYTES]
            return is_taken

        try:
            await reply.write(answer.first)
            while not answer.complete:
                await answer.pour(take)
                await reply.catch_up()
        except UpstreamError as exc:
            if answer.is_event_stream:
                self._metrics.broken_streams.labels(exc.code).inc()
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
