"""Realtime: joins a client's WebSocket to a replica's.

    1 connect   a replica by model, session and load; another one if it refuses; then the upgrade
    2 relay     messages unread and unchanged, each way, no faster than the slower side reads
    3 end       either side's end becomes the other's, with its code

The model is in the query. After the upgrade no other replica can continue, because only this
replica's engine has the audio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDict

from router.api import realtime
from router.api.routes import named_model
from router.config import LimitsConfig
from router.errors import (
    BadRequest,
    HandshakeRefused,
    NoReplicaAvailable,
    Overloaded,
    RouteNotServed,
    RouterError,
    Unauthorized,
    UnsupportedBody,
    UpstreamError,
    UpstreamUnreachable,
)
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.records.record import Try
from router.request import tenancy
from router.request.headers import RequestHeaders, explained_headers
from router.request.plan import Placement
from router.request.results import Inbound, Prompt, Tries
from router.request.retry import NO_ROUTE
from router.request.story import Story
from router.upstream import Upstream
from router.upstream.socket import Frame, Socket

SWITCHED: Final = 101
"""Status in records of a connection that was made."""

_NORMAL, _GOING_AWAY, _TOO_BIG, _FAILED, _LATER = 1000, 1001, 1009, 1011, 1013
"""Close codes. Source: RFC 6455 section 7.4.1; 1013: IANA's registry."""

_FAILURES: Final = frozenset({1011, 1012, 1013, 1014})
"""Codes with which an engine says that it failed."""

_NO_ROUTE: Final = 403
"""What vLLM's server answers to every WebSocket without a route."""

_WEBSOCKET: Final = "sec-websocket-"

Upgrade = Callable[[CIMultiDict[str]], Awaitable[Socket]]


class Held(Protocol):
    """The bytes of one connection's messages, within the router's budget."""

    def count(self, num_bytes: int) -> None:
        """Add a message; raises Overloaded if the budget is used up."""

    def release(self, num_bytes: int) -> None:
        """Remove a message."""


class _End(Struct, frozen=True):
    """What ended a connection (client, replica, idle, limit), and that side's last frame."""

    by: str
    frame: Frame = Frame(None)
    text: str = ""


class Realtime:
    """Serves WebSockets."""

    def __init__(
        self,
        story: Story,
        *,
        upstream: Upstream,
        headers: RequestHeaders,
        limits: LimitsConfig,
        metrics: Metrics,
    ) -> None:
        self._story = story
        self._steps = story.steps
        self._upstream = upstream
        self._headers = headers
        self._limits = limits
        self.max_message_bytes = limits.websocket_message_bytes
        self._metrics = metrics
        self._num_open = 0

    async def serve(self, inbound: Inbound, request_id: str, upgrade: Upgrade, held: Held) -> None:
        """Serve one connection to its end; `upgrade` makes it the client's WebSocket.

        Raises:
            RouterError: it is refused before the upgrade.
        """
        if self._num_open >= self._limits.websockets:
            raise Overloaded(f"{self._limits.websockets} WebSockets are open (limits.websockets)")
        tenant = inbound.tenant
        if tenant is not None and (tenant.salt is not None or tenant.models is not None):
            raise UnsupportedBody(
                "messages are not read, so tenants with their own cache or a list of models cannot "
                "use WebSockets"
            )
        self._num_open += 1
        self._metrics.websockets.inc()
        try:
            query = inbound.target.partition("?")[2]
            model = named_model(
                inbound.path, query, inbound.headers, form_model=None, view=None, reads_query=True
            )
            inbound = replace(inbound, model=model, needs_model=True)
            prompt, tries = await self._story.prepare(inbound, request_id), Tries()
            placement, engine = await self._connect(prompt, tries)
            await self._joined(prompt, tries, placement, engine, upgrade, held)
        finally:
            self._num_open -= 1
            self._metrics.websockets.dec()

    async def _joined(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        engine: Socket,
        upgrade: Upgrade,
        held: Held,
    ) -> None:
        """Upgrade the client, and pass messages on until an end."""
        status, outcome, ended_by = 499, Outcome.CLIENT_GONE, "shutdown"
        try:
            client = await upgrade(explained_headers(prompt, tries, placement))
            status = SWITCHED
            end = await self._relay(client, engine, held)
            ended_by = end.by
            outcome = await _close(client, engine, end)
        finally:
            await engine.close(_GOING_AWAY)  # no effect if it is closed
            self._metrics.websockets_ended.labels(ended_by).inc()
            self._finish(prompt, tries, placement, status, outcome)

    # ---------------------------------------------------------------- 1 connect

    async def _connect(self, prompt: Prompt, tries: Tries) -> tuple[Placement, Socket]:
        """Connect to a replica.

        Raises:
            RouterError: no replica accepts the connection.
        """
        steps = self._steps
        steps.retries.note_request()
        while True:
            try:
                plan = steps.place.plan(prompt, tries)
            except RouteNotServed as exc:
                raise _refusal(prompt.read.model, _NO_ROUTE) from exc
            placement = steps.place.commit(prompt, tries, plan)
            try:
                engine = await self._open(prompt, placement)
            except UpstreamError as exc:
                refused = exc.answered if isinstance(exc, HandshakeRefused) else 500
                failure = f"status_{refused}" if isinstance(exc, HandshakeRefused) else exc.code
                if refused in (_NO_ROUTE, 404):
                    failure = NO_ROUTE
                elif refused < 500:
                    self._finish(prompt, tries, placement, refused, Outcome.CLIENT_ERROR)
                    raise _refusal(prompt.read.model, refused) from exc
                prompt, objection = steps.retries.judge(prompt, tries, placement, failure)
                if failure == NO_ROUTE:
                    if objection is not None:
                        self._finish(prompt, tries, placement, refused, Outcome.CLIENT_ERROR)
                        raise _refusal(prompt.read.model, refused) from exc
                    steps.place.end(placement, Outcome.CLIENT_ERROR)
                    await steps.retries.move_on(prompt, tries, placement)
                    continue
                is_absent = isinstance(exc, UpstreamUnreachable)
                outcome = Outcome.REPLICA_UNREACHABLE if is_absent else Outcome.REPLICA_FAILED
                if objection is not None:
                    self._finish(prompt, tries, placement, exc.status, outcome)
                    if is_absent:
                        text = f"No replica can take a request now: {exc.message}."
                        raise NoReplicaAvailable(text) from exc
                    raise
                steps.place.end(placement, outcome)
                await steps.retries.move_on(prompt, tries, placement)
            except BaseException:
                self._finish(prompt, tries, placement, 499, Outcome.CLIENT_GONE)
                raise
            else:
                tries.records.append(Try(candidate=placement.lease.candidate))
                return placement, engine

    async def _open(self, prompt: Prompt, placement: Placement) -> Socket:
        headers = self._headers.of(prompt, placement)
        for name in [name for name in headers if name.lower().startswith(_WEBSOCKET)]:
            headers.popall(name, None)  # the handshake is ours; a subprotocol may have a key
        return await self._upstream.connect(
            placement.replica,
            placement.candidate.replica.url + prompt.read.inbound.target,
            headers=headers,
            max_bytes=self._limits.websocket_message_bytes,
        )

    # ---------------------------------------------------------------- 2 relay

    async def _relay(self, client: Socket, engine: Socket, held: Held) -> _End:
        """Pass messages on until either side ends, or both are silent for too long."""
        ends: list[_End] = []
        loop, idle_s = asyncio.get_running_loop(), self._limits.websocket_idle_s

        async def pump(by: str, source: Socket, sink: Socket) -> None:
            passed = self._metrics.websocket_messages.labels(by)
            while True:
                frame = await source.receive()
                deadline.reschedule(loop.time() + idle_s)
                if frame.data is None:
                    ends.append(_End(by, frame))
                    break
                try:
                    held.count(len(frame.data))
                except Overloaded as error:
                    ends.append(_End("limit", text=error.message))
                    break
                passed.inc()
                if not await sink.send(frame.data):
                    return  # the sink's own pump reports how it ended
                held.release(len(frame.data))
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()

        try:
            async with asyncio.timeout(idle_s) as deadline, asyncio.TaskGroup() as tg:
                tasks = [
                    tg.create_task(pump("client", client, engine), name="to replica"),
                    tg.create_task(pump("replica", engine, client), name="to client"),
                ]
        except TimeoutError:
            return _End("idle")
        return ends[0] if ends else _End("client")

    # ---------------------------------------------------------------- 3 end

    def _finish(
        self, prompt: Prompt, tries: Tries, placement: Placement, status: int, outcome: Outcome
    ) -> None:
        """Give back what a connection holds, and record it."""
        self._steps.place.end(placement, outcome)
        if tries.charge is not None:
            tenancy.settle(tries.charge, tries, placement, status, None)
        self._steps.recorder.finished(prompt, tries, placement, status=status, outcome=outcome)


async def _close(client: Socket, engine: Socket, end: _End) -> Outcome:
    """End both sides; return the outcome from the replica's view."""
    frame = end.frame
    match end.by:
        case "idle":
            text = "the connection was idle for too long (limits.websocket_idle_s)"
            await client.close(_GOING_AWAY, text, last=realtime.error_text(text, "idle"))
            return Outcome.OK
        case "limit":
            last = realtime.error_text(end.text, Overloaded.code)
            await client.close(_LATER, end.text, last=last)
            return Outcome.OK
        case "client":
            left = _TOO_BIG if frame.is_too_big else _GOING_AWAY
            code = frame.code or (_NORMAL if frame.code == 0 else left)
            await engine.close(code, frame.reason)
            await client.close(code, frame.reason)
            return Outcome.CLIENT_GONE if frame.code is None else Outcome.OK
    if frame.code is None:
        text = "the replica failed; start the session again"
        await client.close(_FAILED, text, last=realtime.error_text(text, "upstream_broken"))
        return Outcome.REPLICA_FAILED
    await client.close(frame.code or _NORMAL, frame.reason)
    return Outcome.REPLICA_FAILED if frame.code in _FAILURES else Outcome.OK


def _refusal(model: str | None, status: int) -> RouterError:
    """Return the error for an engine that refuses a connection.

    vLLM 0.32 has the route only if its model supports it.
    """
    if status == 401:
        return Unauthorized("the engine refused the key")
    return BadRequest(
        f"`{model}` has no {realtime.PATH}: its engine answered {status}", param="model"
    )
