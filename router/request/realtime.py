"""Realtime: passes the bytes of a client's WebSocket to a replica's, and back.

Its handshake is a request like any other: placed by model, session and load, sent to another
replica under the same rules (`retry.py`), recorded at its end. Once an engine has agreed (101), its
bytes go each way unread and unchanged, no faster than the slower side takes them. No other replica
can continue then, because only this one's engine has the audio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from router.api.realtime import FAILED, FAILURES, GOING_AWAY
from router.base.caller import Caller
from router.base.errors import Overloaded, UnsupportedBody, UpstreamBroken
from router.config import LimitsConfig
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.request.reply import Reply
from router.upstream.socket import Socket

if TYPE_CHECKING:
    from router.request.relay import Passage

_IDLE: Final = "the connection was idle for too long (limits.websocket_idle_s)"
_BROKEN: Final = "the replica failed; start the session again"


class Realtime:
    """Counts WebSockets, and joins them to those of replicas."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._num_open = 0

    @contextmanager
    def open(self, caller: Caller) -> Iterator[None]:
        """Count one WebSocket, from its handshake to its end.

        Raises:
            Overloaded: too many are open.
            UnsupportedBody: its caller cannot use any.
        """
        if self._num_open >= self._limits.websockets:
            raise Overloaded(f"{self._limits.websockets} WebSockets are open (limits.websockets)")
        if caller.salt is not None or caller.models is not None:
            raise UnsupportedBody(
                "messages are not read, so tenants with their own cache or a list of models cannot "
                "use WebSockets"
            )
        self._num_open += 1
        self._metrics.websockets.inc()
        try:
            yield
        finally:
            self._num_open -= 1
            self._metrics.websockets.dec()

    async def join(self, passage: Passage, reply: Reply, headers: CIMultiDict[str]) -> None:
        """Pass bytes on, each way, until either side ends or both are silent for too long.

        Raises:
            ConnectionError: the client left without closing.
            UpstreamBroken: the replica did.
        """
        engine = passage.answer.upgraded()
        client = await reply.upgrade(headers)
        ends: list[str] = []
        try:
            await self._until_end(client, engine, ends)
        finally:
            by = next(iter(ends), "client" if client.content.is_eof() else "shutdown")
            self._metrics.websockets_ended.labels(by).inc()
            passage.outcome = _outcome(by, client, engine)
        if passage.outcome is not Outcome.CLIENT_GONE:
            return
        if by == "idle":
            passage.outcome = Outcome.OK
            await client.close(GOING_AWAY, _IDLE, by)
        elif by == "replica":
            name = passage.placement.replica
            await client.close(FAILED, _BROKEN, UpstreamBroken.code)
            raise UpstreamBroken(name, f"replica {name} broke off a WebSocket")
        else:
            raise ConnectionResetError("the client disconnected")

    async def _until_end(self, client: Socket, engine: Socket, ends: list[str]) -> None:
        """Pass bytes on; put into `ends` who ended it, the first one first."""
        loop, idle_s = asyncio.get_running_loop(), self._limits.websocket_idle_s

        async def pass_on(by: str, source: Socket, sink: Socket) -> None:
            passed = self._metrics.websocket_messages.labels(by)
            while (client.sent.code is None or engine.sent.code is None) and (
                data := await source.read()
            ):
                try:
                    num_messages = await sink.write(data)
                except ConnectionError:
                    break  # the other task finds how it ended
                if num_messages:
                    passed.inc(num_messages)
                    deadline.reschedule(loop.time() + idle_s)
                if sink.sent.code is not None:
                    ends.append(by)
            else:
                ends.append(by)
                for task in tasks:
                    task.cancel()

        try:
            async with asyncio.timeout(idle_s) as deadline, asyncio.TaskGroup() as tg:
                tasks = [
                    tg.create_task(pass_on("client", client, engine), name="to replica"),
                    tg.create_task(pass_on("replica", engine, client), name="to client"),
                ]
        except TimeoutError:
            ends.append("idle")


def _outcome(by: str, client: Socket, engine: Socket) -> Outcome:
    """Return how a WebSocket ended, as far as its frames show."""
    if client.sent.code is None and engine.sent.code is None:
        return Outcome.CLIENT_GONE  # unless something else ended it
    is_failure = by == "replica" and client.sent.code in FAILURES
    return Outcome.REPLICA_FAILED if is_failure else Outcome.OK
