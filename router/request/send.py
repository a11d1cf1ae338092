"""Send: one try, from its headers to the end of its answer.

`Sender` sends a try. It keeps as much of the answer as another replica may still replace: a whole
answer, or the beginning of a stream until something was generated. Headers are those of a request
as its engine gets them, and of an answer as its client does.

`Relay` passes the answer on, byte for byte. No other replica can answer instead after the first
byte. If the replica of a stream fails then, the client gets an error event in the shape of its API.
An engine's own error event is passed on as it came, and so is an abort: only the outcome says that
the replica failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

from msgspec import Struct
from multidict import CIMultiDict

from router.api.answers import MAX_BYTES as MAX_OPENING_BYTES
from router.api.answers import (
    TAIL_BYTES,
    Begun,
    Ending,
    Opening,
    Usage,
    ending_of_stream,
    error_event,
    opening_of,
    says_abort,
)
from router.api.body import PREFIX, Withheld
from router.api.responses import CREATE
from router.api.routes import engine_route, lacks_route
from router.api.sessions import FORWARDED, engine_name
from router.base.caller import ANYBODY
from router.base.errors import AnswerUnreadable, UpstreamError
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.metrics import Metrics
from router.records.record import Outcome
from router.replicas.registry import EngineKey
from router.request.observer import NO_OBSERVERS, Observers
from router.request.place import Place
from router.request.results import Inbound, Passage, Placement, Prompt, Read, Sent, Tries, Wait
from router.request.retry import (
    NO_DEATH,
    NO_RESPONSE,
    NO_ROUTE,
    SET_ASIDE,
    TOO_MANY,
    UNLOADED,
    Retries,
    Witness,
)
from router.tokens.hand_over import HandOver
from router.upstream import Answer, Upstream, end_to_end

_NOT_FORWARDED: Final = frozenset({"host", "content-length", "expect"}) | FORWARDED
_NOT_RETURNED: Final = frozenset({"content-length"})  # of streams: one that breaks gets an event


class RequestHeaders:
    """Writes the headers for engines.

    Args:
        key: What replicas are sent in place of a caller's key.
        withheld: What clients may not set.
        observers: May add headers, such as the context of a trace.
    """

    def __init__(
        self, key: EngineKey, withheld: Withheld, observers: Observers = NO_OBSERVERS
    ) -> None:
        self._key = key
        self._observers = observers
        self._drop = _NOT_FORWARDED | withheld.headers

    def of(
        self,
        prompt: Prompt,
        placement: Placement,
        *,
        engine_id: str | None = None,
    ) -> CIMultiDict[str]:
        """Pass the client's headers on, and add those that an engine reads from a router.

        A caller's key is for the router: the engine gets its own, if there is one.

        Args:
            prompt: The request.
            placement: Where it goes.
            engine_id: The request's name at engines that match both halves by it. None: its own.
        """
        read = prompt.read
        headers = end_to_end(read.inbound.headers.items(), drop=self._drop, drop_prefix=PREFIX)
        if read.inbound.caller is not ANYBODY:
            for name in ("Authorization", "x-api-key"):
                headers.popall(name, None)
            headers.update(self._key.headers(placement.candidate.replica.url))
        headers["Accept-Encoding"] = "identity"  # compressed answers cannot be read on their way
        headers["X-Request-Id"] = engine_id or read.request_id
        headers.popall("X-Session-ID", None)
        if read.whose.session_hash is not None:  # engines name it in their events
            headers["X-Session-ID"] = engine_name(read.whose.session_hash)
        if placement.candidate.rank is not None:
            headers["X-data-parallel-rank"] = str(placement.candidate.rank)
        if read.inbound.client is not None:
            read.inbound.client.write(headers)
        self._observers.sent(prompt, placement, headers)
        return headers


def answer_headers(
    prompt: Prompt, tries: Tries, placement: Placement, answer: Answer
) -> CIMultiDict[str]:
    """Pass an engine's headers on, and add the decision."""
    drop = _NOT_RETURNED if answer.is_event_stream else frozenset[str]()
    headers = end_to_end(answer.headers.items(), drop=drop, drop_prefix=PREFIX)
    headers["x-warmroute-request-id"] = prompt.read.request_id
    # On a refused request they would show what others had sent, at no cost to the client.
    client = prompt.read.inbound.client
    if answer.status < 400 and client is not None and client.sees_details:
        _explain_in(headers, prompt, tries, placement)
    return headers


def early_headers(
    prompt: Prompt, tries: Tries, waits: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return headers of a stream that begins before its answer does.

    Args:
        prompt: The request.
        tries: Its tries.
        waits: How it waits, see `WaitingRoom.describe`. None: it does not.
    """
    client = prompt.read.inbound.client
    if client is None or not client.sees_details:
        return {}
    if waits is None:
        return _waited(tries.wait)
    return {"x-warmroute-waits": f"for={waits['for'] or 'turn'};before={waits['before']}"}


def counted_headers(read: Read) -> CIMultiDict[str]:
    """Return the headers of an answer that no engine was asked for."""
    headers: CIMultiDict[str] = CIMultiDict()
    headers["Content-Type"] = "application/json"
    headers["x-warmroute-request-id"] = read.request_id
    return headers


def _explain_in(
    headers: CIMultiDict[str], prompt: Prompt, tries: Tries, placement: Placement
) -> None:
    headers["x-warmroute-replica"] = placement.lease.candidate
    headers["x-warmroute-policy"] = placement.plan.policy.name
    if prompt.variant is not None:
        headers["x-warmroute-variant"] = prompt.variant.record.label
    if tries.helped is not None:
        is_remote = tries.helped.result == "remote"
        headers["x-warmroute-prefill"] = tries.helped.where if is_remote else "local"
    held = placement.predicted
    if not placement.plan.is_guess:
        headers["x-warmroute-cached"] = (
            f"gpu={held.num_gpu_tokens};cpu={held.num_cpu_only_tokens}"
            f";pool={held.num_fetched_tokens}"
        )
    waited_ms = tries.wait.waited_ms
    router_ms = (placement.placed_s - prompt.read.inbound.arrived_s) * 1000 - waited_ms
    headers["x-warmroute-ms"] = f"{router_ms:.2f}"
    headers.update(_waited(tries.wait))


def _waited(wait: Wait) -> dict[str, str]:
    if wait.released is None:
        return {}
    headers = {"x-warmroute-waited-ms": f"{wait.waited_ms:.1f}"}
    if wait.held_by is not None:
        headers["x-warmroute-waited-for"] = wait.held_by
    return headers


logger = logging.getLogger(__name__)

RETRYABLE: Final = frozenset({500, 502, 503, 504})
"""An engine's own failures, worth one more replica. 500: Mooncake's connector answers it when a
pool object vanished between look-up and fetch (kv_load_failure_policy `fail`)."""

_SET_ASIDE: Final = (
    b"Generation is paused.",
    b"The model is currently scaling.",
    b"This data-parallel rank has been retired",
)
"""What a 503 says of a replica that is well, and computes nothing for now: paused, or changed by
elastic EP, which leaves /health at 200. Source: `_reject_add_while_paused` in v1/engine/core.py and
entrypoints/serve/elastic_ep/middleware.py of vLLM 0.33.0."""

_MISSING: Final = frozenset({404, 405})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

_IDS_FIELD: Final = b"prompt_token_ids"
_SPACE: Final = b" \t\r\n"
_LOOK_S: Final = 0.5
_SMALL_ANSWER: Final = 1024 * 1024
_MAX_HELD_BYTES: Final = 4 * 1024 * 1024


class Transfer(Struct, frozen=True, kw_only=True):
    """What the two halves of a request have in common, if another replica computes its prompt.

    body: With the parameters of the transfer. None: as it came.
    engine_id: The request's name at engines that match both halves by it. None: its own.
    """

    body: bytes | None = None
    engine_id: str | None = None


NO_TRANSFER: Final = Transfer()


class Sender:
    """Sends requests to replicas, as token ids where that is proven (`router.tokens.hand_over`).

    The ids stand in `kv_transfer_params.prompt_token_ids`, behind all other fields. The engine
    ignores them where `echo` is asked for or messages have media. Parsers, logprobs and salts work
    as ever. Source: vLLM 0.32.0, renderers/online_renderer.py.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        models: ServedModels,
        sleepers: Sleepers,
        headers: RequestHeaders,
        retries: Retries,
        hand_over: HandOver,
        metrics: Metrics,
    ) -> None:
        self._upstream = upstream
        self._models = models
        self._sleepers = sleepers
        self._headers = headers
        self._retries = retries
        self._hand_over = hand_over
        self._metrics = metrics
        self._compress: set[str] = set()  # replicas that answered compressed

    async def send(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        transfer: Transfer = NO_TRANSFER,
    ) -> Sent:
        """Send one try.

        Raises:
            OutOfConnections: as `Upstream.open`.
        """
        body, kind = transfer.body, prompt.read.kind
        if body is None:
            body = await self._body_with_ids(prompt, tries, placement)
        has_ids = body is not None and transfer.body is None
        try:
            answer = await self._ask(prompt, tries, placement, body, transfer.engine_id)
            if has_ids and self._refuses_ids(prompt, answer):
                answer.close()
                has_ids, kind = False, None
                answer = await self._ask(prompt, tries, placement, None, transfer.engine_id)
        except UpstreamError as exc:
            return Sent(error=exc, failure=exc.code)
        failure = await self._failure(prompt, placement, answer)
        return Sent(answer=answer, failure=failure, kind=kind, has_ids=has_ids)

    async def _failure(self, prompt: Prompt, placement: Placement, answer: Answer) -> str | None:
        """Return in what way an answer is a failure of its replica. None: it is none."""
        if answer.fault is not None:
            return answer.fault
        status = answer.outcome_status
        if status == 429:
            return TOO_MANY
        if status in _MISSING and (missing := _missing(prompt, answer)) is not None:
            return missing
        if answer.status == 404 and await self._is_unloaded(prompt, placement):
            return UNLOADED
        if status not in RETRYABLE:
            return None
        if status == 503 and any(text in answer.first for text in _SET_ASIDE):
            self._sleepers.set_aside(placement.replica, monotonic())
            return SET_ASIDE
        return f"{'status' if answer.error_status is None else 'event'}_{status}"

    async def _is_unloaded(self, prompt: Prompt, placement: Placement) -> bool:
        """Return whether a replica no longer has the model or adapter that it was asked for."""
        model = prompt.read.model
        return model is not None and not await self._models.has(placement.replica, model)

    async def _ask(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        body: bytes | None,
        engine_id: str | None,
    ) -> Answer:
        """Open an answer, and keep as much of it here as may be replaced.

        `body`: None: the client's own.
        """
        if body is None:
            body = _client_body(prompt.read.inbound)
        overdue_s = self._retries.overdue_s(placement)
        wait_s = partial(self._retries.wait_s, prompt, tries, placement)
        answer = await self._upstream.open(
            placement.replica,
            placement.candidate.replica.url + prompt.read.inbound.target,
            method=prompt.read.inbound.method,
            headers=self._headers.of(prompt, placement, engine_id=engine_id),
            body=body,
            may_move_on=partial(self._retries.may_move_on, prompt, tries, placement),
            may_resend=not prompt.read.has_side_effects,
            patience=wait_s if overdue_s else None,
            patience_s=overdue_s or 0.0,
            hold=partial(self._hold, prompt),
        )
        if answer.error_status is not None:
            name, status = placement.replica, str(answer.error_status)
            self._metrics.first_event_errors.labels(name, status).inc()
        if answer.is_encoded:
            self._note_encoded(placement.replica)
        try:
            location = answer.headers.get("Location", "")
            if answer.status in _REDIRECTS and "//" in location.partition("?")[0]:
                name = placement.replica
                raise AnswerUnreadable(
                    name,
                    f"replica {name} answered with a redirect (status {answer.status}), which is "
                    "refused: it would name the engine's own address",
                )
            if answer.is_encoded and answer.streams:  # not read, so not held either
                answer.first_s = None if prompt.read.inbound.api.starts_early else monotonic()
            elif not answer.is_event_stream:
                await answer.gather(_SMALL_ANSWER)
                answer.first_s = monotonic()
                is_aborted = prompt.read.inbound.api.is_aborted
                if answer.status == 200 and answer.complete and is_aborted(answer.readable):
                    answer.fault = Ending.ABORTED.value
        except BaseException:
            answer.close()
            raise
        return answer

    async def _body_with_ids(
        self, prompt: Prompt, tries: Tries, placement: Placement
    ) -> bytes | None:
        """Return a request's body with its token ids. None: it goes as it came.

        80,000 ids take 0.2 ms, where none was written before 0.6.
        """
        kind, tokens, model = prompt.read.kind, prompt.tokens, prompt.read.model or ""
        if kind is None or prompt.way != "local" or tokens is None or tries.records:
            return None  # after a failure it goes as it came
        if not self._hand_over.is_due(
            model,
            kind,
            placement.replica,
            prompt.num_tokens,
            monotonic(),
            version=placement.candidate.replica.version,
        ):
            return None
        steps = tokens.json()
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            ids: bytes = end.value
        body = with_ids(prompt.read.inbound.body or b"", ids)
        if body is not None:
            self._metrics.handed_over.labels(model).inc()
        return body

    def _refuses_ids(self, prompt: Prompt, answer: Answer) -> bool:
        """Return whether an engine refused the ids: the request is to be sent without them.

        Also records whether it failed on them.
        """
        model, now_s = prompt.read.model or "", monotonic()
        if answer.outcome_status == 400 and _IDS_FIELD in answer.readable:
            self._hand_over.suspend(model, "refused", now_s)
            return True
        self._hand_over.observe_attempt(model, now_s, failed=answer.outcome_status == 500)
        return False

    def _note_encoded(self, replica: str) -> None:
        """Log, once for each replica, that what answers there compresses without being asked."""
        if replica not in self._compress:
            self._compress.add(replica)
            hint = "streams are not read: no usage, and no other replica after the first byte"
            logger.warning("answers come compressed", extra={"replica": replica, "hint": hint})

    async def _hold(self, prompt: Prompt, answer: Answer) -> None:
        """Hold a stream's beginning here until something was generated, or generating failed.

        After `hold_s` it is passed on, unless its replica may hang: then another one may answer.
        """
        if not answer.is_event_stream:
            return
        answer.first_s = begun_s = monotonic()
        if answer.status != 200:
            return
        api, read = prompt.read.inbound.api, prompt.read
        # A client that gets comments meanwhile can wait for the first token.
        gets_comments = read.keepalive_s is not None and not read.has_side_effects
        is_patient = api.starts_early and gets_comments
        until_s = None if is_patient else begun_s + api.hold_s
        opening, most = (
            Opening(),
            MAX_OPENING_BYTES + api.repeats * len(prompt.read.inbound.body or b""),
        )
        while (said := opening.read(answer.first)) is Begun.NOT_YET:
            if answer.complete or len(answer.first) >= min(most, _MAX_HELD_BYTES):
                break
            if not await answer.read_on(None if until_s is None else until_s - monotonic()):
                if not answer.may_hang(begun_s):
                    break
                until_s = monotonic() + _LOOK_S
        if api.starts_early:
            answer.first_s = None if said is Begun.NOT_YET else monotonic()
        if isinstance(said, int):
            answer.error_status = said
        elif said is Begun.ABORTED or (said is Begun.ENDED and api.last is not None):
            answer.fault = Ending.ABORTED.value
        elif said is Begun.NOT_YET and answer.complete and api.last is not None:
            answer.fault = Ending.CUT.value


def _missing(prompt: Prompt, answer: Answer) -> str | None:
    """Return what a replica lacks that another may have, by its 404 or 405. None: nothing.

    The route; or the response that is named, if no router knows which replica issued it.
    """
    read, status = prompt.read, answer.outcome_status
    if lacks_route(status, answer.readable):
        is_engines = engine_route(read.inbound.method, read.inbound.path) is not None
        return NO_ROUTE if is_engines else None
    if read.response_id is None or prompt.owner is not None or status != 404:
        return None
    is_named = read.inbound.path != CREATE or read.response_id.encode() in answer.readable
    return NO_RESPONSE if is_named else None


def _client_body(inbound: Inbound) -> bytes | None:
    """Return the body to forward: as it came, unless a field of it had to change."""
    as_sent = inbound.as_sent
    return as_sent.body if as_sent is not None and inbound.body is as_sent.view else inbound.body


def with_ids(body: bytes, ids: bytes) -> bytes | None:
    """Add the ids, in JSON, to a JSON object that has other members; None: it is none."""
    end = len(body.rstrip(_SPACE)) - 1
    if body[end : end + 1] != b"}":
        return None
    return b"".join((body[:end], b',"kv_transfer_params":{"prompt_token_ids":[', ids, b"]}}"))


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
