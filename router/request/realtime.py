"""Realtime: a client's WebSocket and a replica's, made one.

    1 place     the model is named in the query, or in the client's first `session.update`; then as
                for any request: a candidate by session and load, a lease, another one if it refuses
    2 relay     messages as they are, each way, at the pace of who takes them
    3 end       either side's end is the other's, with its code; load given back, recorded

Where only an event names the model, the client is answered before a replica is known: it gets its
`session.created` from us, and the replica's own is left out. Nothing is sent anywhere else once a
replica has had a message: its engine has the audio, and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDict

from router.api import realtime
from router.api.model_names import named_model
from router.api.usage import Usage
from router.config import LimitsConfig
from router.errors import (
    BadRequest,
    HandshakeRefused,
    NoReplicaAvailable,
    Overloaded,
    RouterError,
    Unauthorized,
    UnknownModel,
    UnsupportedBody,
    UpstreamError,
    UpstreamUnreachable,
)
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.records.record import Try
from router.replicas.fleet import Fleet
from router.request import tenancy
from router.request.headers import RequestHeaders, explained_headers
from router.request.plan import Placement
from router.request.results import Inbound, Prompt, Tries
from router.request.story import Story
from router.upstream import Upstream
from router.upstream.socket import Frame, Socket

logger = logging.getLogger(__name__)

SWITCHED: Final = 101
"""Status in records of a connection that was made."""

_NORMAL, _GOING_AWAY, _POLICY, _TOO_BIG, _FAILED, _LATER = 1000, 1001, 1008, 1009, 1011, 1013
"""Close codes. Source: RFC 6455 section 7.4.1; 1013: IANA's registry."""

_FAILURES: Final = frozenset({1011, 1012, 1013, 1014})
"""With which an engine says that it could not go on."""

_WEBSOCKET: Final = "sec-websocket-"

Upgrade = Callable[[CIMultiDict[str]], Awaitable[Socket]]


class Held(Protocol):
    """The messages of one connection that are held, among all that the router holds."""

    def count(self, num_bytes: int) -> None:
        """Count some more.

        Raises:
            Overloaded: the budget is used up.
        """

    def release(self, num_bytes: int) -> None:
        """Count them no longer."""


class _Call(Struct, kw_only=True):
    """A connection to a replica, and what is held for it."""

    prompt: Prompt
    tries: Tries
    placement: Placement
    engine: Socket
    held: Held
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    has_usage: bool = False

    def note(self, usage: Usage) -> None:
        self.has_usage = True
        self.num_prompt_tokens += usage.prompt_tokens
        self.num_completion_tokens += usage.completion_tokens or 0

    @property
    def usage(self) -> Usage | None:
        """Sum what the engine reported of its utterances; None: nothing."""
        if not self.has_usage:
            return None
        return Usage(self.num_prompt_tokens, self.num_completion_tokens)


class _End(Struct, frozen=True):
    """How it ended: whose end it was (client, replica, idle, limit), and the frame that said so."""

    by: str
    frame: Frame
    text: str = ""  # of what ended it here


class Realtime:
    """Serves WebSockets."""

    def __init__(
        self,
        story: Story,
        *,
        upstream: Upstream,
        headers: RequestHeaders,
        fleet: Fleet,
        limits: LimitsConfig,
        metrics: Metrics,
    ) -> None:
        self._story = story
        self._steps = story.steps
        self._upstream = upstream
        self._headers = headers
        self._fleet = fleet
        self._limits = limits
        self._metrics = metrics
        self._num_open = 0

    async def serve(self, inbound: Inbound, request_id: str, upgrade: Upgrade, held: Held) -> None:
        """Serve one connection to its end; `upgrade` makes it the client's WebSocket.

        Raises:
            RouterError: it is refused; nothing was upgraded yet.
        """
        if self._num_open >= self._limits.websockets:
            raise Overloaded(f"{self._limits.websockets} WebSockets are open (limits.websockets)")
        if inbound.tenant is not None and inbound.tenant.salt is not None:
            raise UnsupportedBody(
                "audio has no `cache_salt`, so tenants with their own cache cannot use it"
            )
        self._num_open += 1
        self._metrics.websockets.inc()
        try:
            query = inbound.target.partition("?")[2]
            model = named_model(
                inbound.path, query, inbound.headers, form_model=None, view=None, reads_query=True
            )
            if model is not None:
                call = await self._open(replace(inbound, model=model), request_id, held)
                client = await self._upgraded(call, upgrade)
            else:
                self._fleet.candidates(None, monotonic())  # or there is no use in beginning
                client = await upgrade(CIMultiDict({"x-warmroute-request-id": request_id}))
                begun = await self._begin(client, inbound, request_id, held)
                if begun is None:
                    return
                call = begun
            await self._relay(client, call)
        finally:
            self._num_open -= 1
            self._metrics.websockets.dec()

    # ---------------------------------------------------------------- 1 place

    async def _open(self, inbound: Inbound, request_id: str, held: Held) -> _Call:
        """Connect to a replica of the model.

        Raises:
            RouterError: none takes it.
        """
        steps = self._steps
        prompt, tries = await self._story.prepare(inbound, request_id), Tries()
        if prompt.tenant is not None:
            tenancy.check_model(prompt.tenant, prompt.model)
        steps.retries.note_request()
        while True:
            placement = steps.place.commit(prompt, tries, steps.place.plan(prompt, tries))
            try:
                engine = await self._connect(prompt, placement)
            except UpstreamError as exc:
                refused = exc.answered if isinstance(exc, HandshakeRefused) else 500
                if refused < 500:
                    self._finish(prompt, tries, placement, refused, Outcome.CLIENT_ERROR, None)
                    raise _refusal(prompt, refused) from exc
                failure = f"status_{refused}" if isinstance(exc, HandshakeRefused) else exc.code
                prompt, objection = steps.retries.judge(prompt, tries, placement, failure)
                is_absent = isinstance(exc, UpstreamUnreachable)
                outcome = Outcome.REPLICA_UNREACHABLE if is_absent else Outcome.REPLICA_FAILED
                if objection is not None:
                    self._finish(prompt, tries, placement, exc.status, outcome, None)
                    if is_absent:
                        text = f"No replica can take a request now: {exc.message}."
                        raise NoReplicaAvailable(text) from exc
                    raise
                steps.place.end(placement, outcome)
                await steps.retries.move_on(prompt, tries, placement)
            except BaseException:
                self._finish(prompt, tries, placement, 499, Outcome.CLIENT_GONE, None)
                raise
            else:
                tries.records.append(Try(candidate=placement.candidate.id))
                return _Call(
                    prompt=prompt, tries=tries, placement=placement, engine=engine, held=held
                )

    async def _connect(self, prompt: Prompt, placement: Placement) -> Socket:
        headers = self._headers.of(prompt, placement)
        for name in [name for name in headers if name.lower().startswith(_WEBSOCKET)]:
            headers.popall(name, None)  # our own handshake; a subprotocol may hold a key
        return await self._upstream.connect(
            placement.replica,
            placement.candidate.replica.url + prompt.inbound.target,
            headers=headers,
            max_bytes=self._limits.websocket_message_bytes,
        )

    async def _upgraded(self, call: _Call, upgrade: Upgrade) -> Socket:
        """Upgrade a client whose replica is there."""
        try:
            return await upgrade(explained_headers(call.prompt, call.tries, call.placement))
        except BaseException:
            await call.engine.close(_GOING_AWAY)
            self._finish(call.prompt, call.tries, call.placement, 499, Outcome.CLIENT_GONE, None)
            raise

    async def _begin(
        self, client: Socket, inbound: Inbound, request_id: str, held: Held
    ) -> _Call | None:
        """Begin a session, until its client names a model; None: it ended before."""
        try:
            async with asyncio.timeout(self._limits.websocket_idle_s):
                return await self._named(client, inbound, request_id, held)
        except TimeoutError:
            await self._refuse(client, "idle", _GOING_AWAY, "the client named no model in time")
        except RouterError as error:
            code = _LATER if error.status >= 500 else _POLICY
            await self._refuse(client, error.code, code, error.message)
            logger.warning(
                "refused", extra={"request": request_id, "why": error.code, "param": error.param}
            )
        return None

    async def _named(
        self, client: Socket, inbound: Inbound, request_id: str, held: Held
    ) -> _Call | None:
        said: list[str | bytes] = []  # what came before
        await client.send(realtime.created())
        while True:
            frame = await client.receive()
            if frame.data is None:
                await client.close(frame.code or _NORMAL, frame.reason)
                return None
            model = realtime.model_of(frame.data)
            if model == "":
                text = "Missing required field: model"  # the engine's words
                await client.send(realtime.error_text(text, "invalid_event"))
                continue
            said.append(frame.data)
            held.count(len(frame.data))
            if sum(map(len, said)) > self._limits.websocket_message_bytes:
                raise BadRequest("name a model first, in a session.update", param="model")
            if model is None:
                continue
            try:
                call = await self._open(replace(inbound, model=model), request_id, held)
            except UnknownModel as error:
                held.release(len(said.pop()))
                await client.send(realtime.error_text(error.message, error.code))
                continue
            await self._hand(client, call, said)
            return call

    async def _hand(self, client: Socket, call: _Call, said: list[str | bytes]) -> None:
        """Give a replica what its client has sent; what it begins with the client has had."""
        try:
            first = await call.engine.receive()
            if first.data is not None and not realtime.is_created(first.data):
                await client.send(first.data)
            for data in said:
                await call.engine.send(data)
                call.held.release(len(data))
            self._metrics.websocket_messages.labels("client").inc(len(said))
        except BaseException:
            await call.engine.close(_GOING_AWAY)
            self._finish(call.prompt, call.tries, call.placement, 499, Outcome.CLIENT_GONE, None)
            raise

    async def _refuse(self, client: Socket, code: str, close: int, message: str) -> None:
        self._metrics.refused.labels(code).inc()
        await client.close(close, message, last=realtime.error_text(message, code))

    # ---------------------------------------------------------------- 2 relay

    async def _relay(self, client: Socket, call: _Call) -> None:
        """Pass messages on until either side ends, or neither says anything for too long."""
        outcome, ended_by = Outcome.CLIENT_GONE, "shutdown"  # unless it gets to its end
        try:
            end = await self._until_end(client, call)
            ended_by = end.by
            outcome = await _close(client, call.engine, end)
        except asyncio.CancelledError:
            await call.engine.close(_GOING_AWAY)
            raise
        finally:
            self._metrics.websockets_ended.labels(ended_by).inc()
            self._finish(call.prompt, call.tries, call.placement, SWITCHED, outcome, call.usage)

    async def _until_end(self, client: Socket, call: _Call) -> _End:
        ends: list[_End] = []
        loop, idle_s = asyncio.get_running_loop(), self._limits.websocket_idle_s
        frames = {by: self._metrics.websocket_messages.labels(by) for by in ("client", "replica")}

        async def pump(by: str, source: Socket, sink: Socket) -> None:
            while True:
                frame = await source.receive()
                deadline.reschedule(loop.time() + idle_s)
                if frame.data is None:
                    ends.append(_End(by, frame))
                    break
                try:
                    call.held.count(len(frame.data))
                except Overloaded as error:
                    ends.append(_End("limit", Frame(None), error.message))
                    break
                if by == "client" and (model := _forbidden(call.prompt, frame.data)) is not None:
                    text = f"The model `{model}` does not exist."
                    await source.send(realtime.error_text(text, UnknownModel.code))
                    call.held.release(len(frame.data))
                    continue
                frames[by].inc()
                if by == "replica" and (usage := realtime.usage_of(frame.data)) is not None:
                    call.note(usage)
                if not await sink.send(frame.data):
                    return  # the other way learns how that ended, after what it still has
                call.held.release(len(frame.data))
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()

        try:
            async with asyncio.timeout(idle_s) as deadline, asyncio.TaskGroup() as tg:
                tasks = [
                    tg.create_task(pump("client", client, call.engine), name="to replica"),
                    tg.create_task(pump("replica", call.engine, client), name="to client"),
                ]
        except TimeoutError:
            return _End("idle", Frame(None))
        return ends[0] if ends else _End("client", Frame(None))

    # ---------------------------------------------------------------- 3 end

    def _finish(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        status: int,
        outcome: Outcome,
        usage: Usage | None,
    ) -> None:
        """Give back what a connection holds, and record it."""
        self._steps.place.end(placement, outcome)
        tenancy.settle(tries, placement, status, usage, monotonic())
        self._steps.recorder.finished(
            prompt, tries, placement, status=status, outcome=outcome, usage=usage
        )


async def _close(client: Socket, engine: Socket, end: _End) -> Outcome:
    """End both sides as one of them did; return how that looks from the replica."""
    frame = end.frame
    if end.by == "idle":
        text = "the connection was idle for too long (limits.websocket_idle_s)"
        await client.close(_GOING_AWAY, text, last=realtime.error_text(text, "idle"))
        await engine.close(_GOING_AWAY)
        return Outcome.OK
    if end.by == "limit":
        await client.close(_LATER, end.text, last=realtime.error_text(end.text, Overloaded.code))
        await engine.close(_GOING_AWAY)
        return Outcome.OK
    if end.by == "client":
        left = _TOO_BIG if frame.is_too_big else _GOING_AWAY
        code = frame.code or (_NORMAL if frame.code == 0 else left)
        await engine.close(code, frame.reason)
        await client.close(code, frame.reason)
        return Outcome.CLIENT_GONE if frame.code is None else Outcome.OK
    if frame.code is None:
        text = "the replica failed; start the session again"
        await client.close(_FAILED, text, last=realtime.error_text(text, "upstream_broken"))
        await engine.close(_GOING_AWAY)
        return Outcome.REPLICA_FAILED
    await client.close(frame.code or _NORMAL, frame.reason)
    await engine.close(frame.code or _NORMAL)
    return Outcome.REPLICA_FAILED if frame.code in _FAILURES else Outcome.OK


def _forbidden(prompt: Prompt, data: str | bytes) -> str | None:
    """Return the model that a client's message names and its tenant may not use; None: none."""
    if prompt.tenant is None or prompt.tenant.models is None:
        return None
    model = realtime.model_of(data, is_plain=False)
    return model if model and not prompt.tenant.may_use(model) else None


def _refusal(prompt: Prompt, status: int) -> RouterError:
    """Say why an engine would not have a connection.

    vLLM 0.32 has the route only where its model can do it, and answers 403 elsewhere, as its server
    does for every WebSocket without a route.
    """
    if status == 401:
        return Unauthorized("the engine refused the key")
    return BadRequest(
        f"`{prompt.model}` has no {realtime.PATH}: its engine answered {status}", param="model"
    )
