"""Answer clients that ask where their prompt differs from an earlier one.

Their answers get one member more, in the fields of their API (see `router.api.diagnostics`). All
other answers go on as they came, and cost nothing here.

    note_answer   an answer has begun: the ledger of sessions gets its id with the prompt
    asked         compare; the answer goes through `Diagnosed`, which puts the finding in

The comparison is known before the answer. Only whether a cache had what both prompts have in common
is read from the answer's usage.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct
from multidict import CIMultiDict
from xxhash import xxh3_64_intdigest

from router.api.diagnostics import (
    MESSAGES,
    NOT_FOUND,
    Comparison,
    message_diagnostics,
    response_diagnostics,
)
from router.api.insertion import Insertion
from router.api.response_ids import issued_in
from router.api.responses_usage import usage_of_response
from router.observers.sessions.bookkeeper import Bookkeeper
from router.observers.sessions.compare import as_of
from router.observers.sessions.threads import Thread
from router.records.computed import Cause
from router.request.plan import Placement
from router.request.reply import Reply
from router.request.results import Prompt, Read, Tries
from router.upstream import Answer

_OK: Final = 200
_LOST: Final = frozenset[Cause](
    ("evicted", "moved", "cleared", "pool_lost", "fetch_failed", "unknown")
)


class Diagnostics:
    """Compares prompts with those of earlier answers, of the same tenant."""

    def __init__(self, bookkeeper: Bookkeeper) -> None:
        self._bookkeeper = bookkeeper

    def asked(
        self, prompt: Prompt, tries: Tries, placement: Placement, answer: Answer, reply: Reply
    ) -> Diagnosed | None:
        """Return what an answer goes through on its way to `reply`. None: it stays as it is."""
        read = prompt.read
        if read.question is None or answer.status != _OK or answer.is_encoded:
            return None
        if not (answer.is_event_stream or answer.complete):
            return None  # too large to be changed
        if read.inbound.path == MESSAGES:
            insertion = self._into_message(prompt, tries, placement)
        else:
            issued = issued_in(answer.readable, is_event_stream=answer.is_event_stream)
            note_answer(read, tries, issued)
            if read.question.earlier is None:
                return None
            insertion = self._into_response(prompt, placement)
        headers: dict[str, str] = {}
        if read.inbound.client is not None and read.inbound.client.sees_details:
            num_cached = placement.predicted.num_cached_tokens
            computed = self._bookkeeper.foresee(prompt, placement, num_cached)
            if computed is not None:
                causes = (f"{cause}={num}" for cause, num in computed.tokens.items())
                headers["x-warmroute-computed"] = ";".join(causes)
        return Diagnosed(reply, insertion, headers, is_stream=answer.is_event_stream)

    def _into_message(self, prompt: Prompt, tries: Tries, placement: Placement) -> Insertion:
        found = self._compare(prompt, placement)

        def members(message: bytes) -> dict[str, Any]:
            note_answer(prompt.read, tries, _decode_id(message).id)
            return {"diagnostics": message_diagnostics(found)}

        return Insertion(("message_start",), "message", members)

    def _into_response(self, prompt: Prompt, placement: Placement) -> Insertion:
        found = self._compare(prompt, placement) or NOT_FOUND

        def members(response: bytes) -> dict[str, Any]:
            usage = usage_of_response(response)
            if usage is None:
                return {}  # it has only begun, in the background
            num_cached = usage.num_cached_tokens
            if num_cached is None:
                num_cached = placement.predicted.num_cached_tokens
            is_reused = self._is_reused(prompt, placement, found, num_cached)
            return {"prompt_cache_diagnostics": response_diagnostics(found, is_reused=is_reused)}

        return Insertion(("response.completed", "response.incomplete"), "response", members)

    def _is_reused(
        self, prompt: Prompt, placement: Placement, found: Comparison, num_cached: int
    ) -> bool:
        """Return whether a cache had what a prompt has in common with the earlier one."""
        if prompt.tokens is None:
            return num_cached > 0
        computed = self._bookkeeper.foresee(prompt, placement, num_cached)
        is_lost = computed is None or not _LOST.isdisjoint(computed.tokens)
        return not is_lost and (num_cached > 0 or not found.num_common)

    def _compare(self, prompt: Prompt, placement: Placement) -> Comparison | None:
        """Compare a prompt with an earlier one. None: it is of a first turn."""
        question, before = prompt.read.question, None
        if prompt.read.response_id is not None:
            return Comparison(difference="unknown")  # its engine has the prompt's beginning
        if question is not None and question.earlier is not None:
            before = self._thread(_digest(prompt.read, question.earlier))
            if before is None:
                return NOT_FOUND
        elif question is not None and not question.is_asked:
            match = self._bookkeeper.match(prompt, placement)
            before = match.thread if match is not None else None
        return None if before is None else self._bookkeeper.compare(prompt, placement, before)

    def _thread(self, answer: int) -> Thread | None:
        """Find the thread of an answer, as it was then."""
        session = self._bookkeeper.ledger.of_answer(answer)
        threads = session.threads if session is not None else []
        return next(filter(None, (as_of(each, answer) for each in reversed(threads))), None)


class Diagnosed:
    """A reply that gets an answer with one member more.

    Args:
        reply: Where the answer goes.
        insertion: Puts the member in.
        headers: More headers of the answer.
        is_stream: Whether it is a stream of events.
    """

    def __init__(
        self, reply: Reply, insertion: Insertion, headers: dict[str, str], *, is_stream: bool
    ) -> None:
        self._reply = reply
        self._insertion = insertion
        self._headers = headers
        self._is_stream = is_stream

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer."""
        insertion = self._insertion
        if self._is_stream:
            body = insertion.take(body) + insertion.end()
        else:
            body = insertion.whole(body)
        headers.popall("Content-Length", None)
        headers.update(self._headers)
        await self._reply.send(status, headers, body, is_own=is_own)

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin a stream."""
        headers.update(self._headers)
        await self._reply.start(status, headers)

    async def keep_alive(self, every_s: float) -> None:
        """Write comments while the answer is silent."""
        await self._reply.keep_alive(every_s)

    async def write(self, chunk: bytes) -> None:
        """Send what goes on after the next piece."""
        await self._reply.write(self._insertion.take(chunk))

    def put(self, chunk: bytes) -> bool:
        """Send what goes on after the next piece, at once."""
        left = self._insertion.take(chunk)
        return self._reply.put(left) if left else True

    async def catch_up(self) -> None:
        """Wait until the client is not behind."""
        await self._reply.catch_up()

    async def end(self) -> None:
        """Send what is left of a stream."""
        await self._reply.write(self._insertion.end())


class _Message(Struct):
    id: str | None = None


_decode_id = msgspec.json.Decoder(_Message).decode


def note_answer(read: Read, tries: Tries, answer_id: str | None) -> None:
    """Note the id of an answer, as its client reads it."""
    if answer_id is not None:
        tries.answer = _digest(read, answer_id)


def _digest(read: Read, answer_id: str) -> int:
    """Digest an answer's id; another tenant's answer has another digest."""
    owner = read.tenant.name if read.tenant is not None else ""
    return xxh3_64_intdigest(f"{owner}\0{answer_id}".encode(errors="surrogatepass"))
