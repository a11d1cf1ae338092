"""Relay an answer to the client, byte for byte.

No other replica can answer instead after the first byte. If the replica of a stream fails then, the
client gets an error event in the shape of its API. An engine's own error event is passed on as it
came, and so is an abort: only the outcome says that the replica failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol

from multidict import CIMultiDict

from router.api.answers import (
    TAIL_BYTES,
    Begun,
    Ending,
    Usage,
    ending_of_stream,
    error_event,
    opening_of,
    says_abort,
)
from router.base.errors import UpstreamError
from router.metrics import Metrics
from router.records.record import Outcome
from router.request.observer import Observers
from router.request.place import Place
from router.request.results import Passage, Prompt
from router.request.retry import NO_DEATH, Witness
from router.request.send import answer_headers
from router.upstream import Answer


class Reply(Protocol):
    """Where the answer goes: the client's connection."""

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer; `is_own`: no engine gave it."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""

    async def keep_alive(self, every_s: float, headers: Callable[[], Mapping[str, str]]) -> None:
        """Write a keep-alive to a stream's client after each silence of so long; runs on.

        headers: Of the stream, if it begins with one.
        """

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once; wait for a client that is behind."""

    def put(self, chunk: bytes, framed: bytes | None = None) -> bool:
        """Send the next piece, at once; False: the client is behind, see `catch_up`.

        framed: The piece in whole chunks of HTTP. None: it did not come so.

        Raises:
            ConnectionError: the client has left.
        """

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""


_LEFT: Final = (ConnectionError, asyncio.CancelledError)
"""Errors if a client has left. Some leave with the last event, before the stream's end."""

_MOST_TAIL_BYTES: Final = 4 * TAIL_BYTES


class Relay:
    """Passes answers on."""

    def __init__(
        self,
        *,
        witness: Witness,
        place: Place,
        metrics: Metrics,
        observers: Observers,
    ) -> None:
        self._observers = observers
        self._witness = witness
        self._place = place
        self._metrics = metrics

    async def pass_on(self, passage: Passage, reply: Reply) -> Usage | None:
        """Pass the answer on, and read its usage and its outcome.

        Raises:
            UpstreamBroken, UpstreamTimeout: it broke off; a stream's client got an error event.
        """
        prompt, tries, placement = passage.prompt, passage.tries, passage.placement
        answer, api = passage.answer, prompt.read.inbound.api
        headers = answer_headers(prompt, tries, placement, answer)
        listeners = self._observers.listeners(passage)
        for listen in listeners:
            listen(answer.first)
        if answer.complete:
            await reply.send(answer.status, headers, answer.first)
            # What is here as a whole was read before: no abort of it is left.
            await self._end(passage, answer.readable if answer.is_event_stream else b"")
            if answer.status != 200 or prompt.read.request is None:
                return None
            # A short stream is here as a whole, too.
            read = api.usage_of_stream if answer.is_event_stream else api.usage_of_body
            return read(answer.readable)
        await reply.start(answer.status, headers)
        tail = bytearray(answer.first)

        def take(chunk: bytes, framed: bytes | None) -> bool:
            for listen in listeners:
                listen(chunk)
            is_taken = reply.put(chunk, framed)
            if passage.first_s is None and opening_of(chunk) is Begun.CONTENT:
                passage.first_s = answer.first_s = monotonic()
                self._place.answered(prompt, placement, answer)
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
                    await reply.write(error_event(exc, prompt.read.inbound.path))
            raise
        except _LEFT:
            if api.end in tail:
                passage.last_usage = _usage_at_the_end(prompt, tail)
            ending = _ending(passage, tail)
            if passage.last_usage is not None or ending not in (None, Ending.CUT):
                passage.outcome = _outcome(answer, ending)
            raise
        await self._end(passage, tail)
        return _usage_at_the_end(prompt, tail)

    async def _end(self, passage: Passage, end: bytes | bytearray) -> None:
        """Set the outcome of an answer that was passed on to its end."""
        answer, ending = passage.answer, _ending(passage, end)
        passage.outcome = _outcome(answer, ending)
        if answer.outcome_status == 200 and passage.outcome is Outcome.REPLICA_FAILED:
            reason = ending.value if isinstance(ending, Ending) else f"event_{ending}"
            self._metrics.broken_streams.labels(reason).inc()
            if reason not in NO_DEATH:
                await self._witness.lost(
                    passage.prompt, passage.tries, passage.placement, reason, is_answered=True
                )


def _ending(passage: Passage, end: bytes | bytearray) -> Ending | int | None:
    """Read how an answer with status 200 ended. None: it cannot be read, or is not such a one."""
    answer, tail = passage.answer, bytes(end[-TAIL_BYTES:])
    if answer.outcome_status != 200 or answer.is_encoded:
        return None
    if answer.is_event_stream:
        return ending_of_stream(tail, passage.prompt.read.inbound.api.last)
    return Ending.ABORTED if says_abort(tail) else None


def _outcome(answer: Answer, ending: Ending | int | None) -> Outcome:
    match ending:
        case None:
            return Outcome.of_status(answer.outcome_status)
        case Ending.WHOLE:
            return Outcome.OK
        case int():
            return Outcome.of_status(ending)
    return Outcome.REPLICA_FAILED


def _usage_at_the_end(prompt: Prompt, tail: bytearray) -> Usage | None:
    if prompt.read.request is None:
        return None
    return prompt.read.inbound.api.usage_of_stream(bytes(tail[-TAIL_BYTES:]))
