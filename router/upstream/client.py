"""The client to the replicas: send one request, wait for the first bytes of its answer."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Final, Self

import aiohttp
from multidict import CIMultiDict

from router.base.errors import (
    OutOfConnections,
    Overdue,
    RouterError,
    SetAside,
    Stalled,
    UpstreamError,
    UpstreamTimeout,
)
from router.base.host_names import Names
from router.base.system import shortage
from router.config import ForwardConfig
from router.config.tls import Tls
from router.replicas.health import Signs
from router.replicas.members import Members
from router.upstream.answer import Answer
from router.upstream.session import (
    Connector,
    HttpSession,
    Response,
    StrayAnswer,
    Strays,
    upstream_error,
)

_RESERVED: Final = 64  # descriptors for logs, Redis, event streams, probes
STALE_S: Final = 1.0
"""A closed connection from the pool is noticed within a round trip; a request that fails later had
reached the replica."""


_WHY: Final[dict[type[UpstreamError], str]] = {
    Overdue: "was too late",
    SetAside: "sleeps or is paused",
    Stalled: "takes requests and computes nothing",
}
"""Reasons to end a wait, besides the deadline."""

_Request = tuple[str, str, CIMultiDict[str], bytes | None]  # URL, method, headers, body


class _Wait:
    """The wait for a first byte: a deadline that is moved as long as there is reason to wait.

    may_move_on: Return whether the request has somewhere else to go, by the failure's code.
    ended_as: Why the wait was ended.
    is_sent: Whether a replica may have the request.
    """

    __slots__ = ("_loop", "_timers", "deadline", "ended_as", "is_sent", "may_move_on")

    def __init__(self, may_move_on: Callable[[str], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Callable[[], float | None], asyncio.TimerHandle] = {}
        self.deadline = asyncio.timeout(None)
        self.may_move_on = may_move_on
        self.ended_as: type[UpstreamError] = UpstreamTimeout
        self.is_sent = False

    def ask_after(
        self, wait_s: float, ask: Callable[[], float | None], *, is_patience: bool = False
    ) -> None:
        """Ask in `wait_s` how long to wait before the next question; None ends the wait."""
        self._timers[ask] = self._loop.call_later(wait_s, self._ask, ask, is_patience)

    def _ask(self, ask: Callable[[], float | None], is_patience: bool) -> None:
        wait_s = ask()
        if wait_s is not None:
            self.ask_after(wait_s, ask, is_patience=is_patience)
        elif not self.deadline.expired():
            self.end(Overdue if is_patience else UpstreamTimeout)

    def end(self, why: type[UpstreamError]) -> None:
        """Fail the request now."""
        self.ended_as = why
        self.deadline.reschedule(0.0)

    def stop(self) -> None:
        """Ask no more: the first byte has come, or the request failed."""
        for timer in self._timers.values():
            timer.cancel()


class Upstream:
    """The pooled client to all replicas. Use as an async context manager.

    Args:
        members: The replicas. One that is seen at work may be silent for longer than the deadlines
            say. None: no sign of work counts.
        strays: Counts connections on which bytes came that no request had asked for.
        names: The addresses of their hosts; None: no other client shares them.
    """

    def __init__(
        self,
        config: ForwardConfig,
        tls: Tls | None = None,
        members: Members | None = None,
        *,
        names: Names | None = None,
        strays: Strays | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._members = members
        self._strays = strays
        self._names = names or Names()
        self._kept: HttpSession | None = None
        self._fresh: HttpSession | None = None  # keeps no connection
        self._waits: dict[str, set[_Wait]] = {}  # by replica
        self._max_connections = config.max_connections or 0
        self._num_open = 0

    async def __aenter__(self) -> Self:
        self._max_connections = self._max_connections or _half_of_descriptors()
        connect_s = self._config.connect_timeout_s
        kept = Connector(
            self._names,
            strays=self._strays,
            keepalive_timeout=self._config.keepalive_s,
            tls=self._tls,
        )
        fresh = Connector(self._names, strays=self._strays, force_close=True, tls=self._tls)
        self._kept = HttpSession(kept, connect_timeout_s=connect_s)
        self._fresh = HttpSession(fresh, connect_timeout_s=connect_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._kept is not None
        assert self._fresh is not None
        await self._kept.close()
        await self._fresh.close()

    @property
    def num_in_use(self) -> int:
        """Count the connections to replicas that requests have."""
        return self._kept.connector.num_in_use if self._kept is not None else 0

    async def open(
        self,
        replica: str,
        url: str,
        *,
        method: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        may_move_on: Callable[[str], bool] = lambda code: True,
        may_resend: bool = True,
        patience: Callable[[], float | None] | None = None,
        patience_s: float = 0.0,
        hold: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> Answer:
        """Send one request and wait for the first bytes of its answer.

        Keep-alives do not count. If a kept connection is closed, a new one is used.

        Args:
            url: Absolute, already encoded; sent as it is.
            headers: End-to-end headers, without Host and Content-Length.
            may_move_on: Asked by `abort`, with the failure's code: whether this request has
                somewhere else to go.
            may_resend: Whether it may be sent twice; if not, it gets a new connection at once.
            patience: Says how long to wait until it is asked again, first after `patience_s`.
            hold: Reads on until enough of the answer has come, under the same deadline.

        Raises:
            Overdue: `patience` returned None: leave now.
            SetAside, Stalled: `abort` was called so.
            UpstreamUnreachable, ConnectTimeout: nothing was sent.
            UpstreamTimeout, UpstreamBroken: nothing of an answer came.
            OutOfConnections: no connection can be made here, to any replica.
        """
        self._count_connection()
        signs = self._members.signs(replica) if self._members is not None else Signs()
        wait = self._wait_for(replica, signs, may_move_on)
        if patience is not None:
            wait.ask_after(patience_s, patience, is_patience=True)
        answer: Answer | None = None
        try:
            async with wait.deadline:
                request = (url, method, headers, body)
                response, first = await self._send(replica, request, wait, may_resend=may_resend)
                answer = Answer(
                    replica, response, first, self._config.idle_timeout_s, signs, self._closed
                )
                await answer.begin()
                if hold is not None:
                    await hold(answer)
        except BaseException as exc:
            if answer is not None:
                answer.close()
            else:
                self._closed()
            if (failure := _failure(exc, replica, wait)) is not None:
                raise failure from exc
            raise
        finally:
            self._waits[replica].remove(wait)
            wait.stop()
            if not self._waits[replica]:
                signs.asked_s = None
        return answer

    def _wait_for(self, replica: str, signs: Signs, may_move_on: Callable[[str], bool]) -> _Wait:
        """Wait for as long as the limit says, and longer while the replica is seen at work."""
        begun_s, limit_s = time.monotonic(), self._config.first_byte_timeout_s
        wait = _Wait(may_move_on)
        self._waits.setdefault(replica, set()).add(wait)
        if signs.asked_s is None:
            signs.asked_s = begun_s
        wait.ask_after(limit_s, lambda: signs.wait_s(begun_s, limit_s, time.monotonic()))
        return wait

    async def _send(
        self, replica: str, request: _Request, wait: _Wait, *, may_resend: bool
    ) -> tuple[Response, bytes]:
        """Send a request; a second time if the kept connection turns out to be useless.

        It was closed, or had another request's answer.
        """
        assert self._kept is not None
        assert self._fresh is not None
        session = self._kept if may_resend else self._fresh
        connection, is_kept = await session.connect(request[0], replica)
        wait.is_sent = True
        begun_s = time.monotonic()
        try:
            return await session.exchange(connection, *request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not is_kept or time.monotonic() - begun_s >= STALE_S:
                raise
        except StrayAnswer:
            pass  # the request's own answer, if there is one, is lost with the connection
        try:
            connection, _ = await self._fresh.connect(request[0], replica)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            if shortage(exc) is not None:
                raise
            # It died with the request: that one was sent, so this is no plain refusal.
            raise aiohttp.ServerDisconnectedError from exc
        return await self._fresh.exchange(connection, *request)

    def _count_connection(self) -> None:
        """Count one more connection.

        Raises:
            OutOfConnections: there are too many.
        """
        if self._num_open >= self._max_connections:
            raise OutOfConnections(
                f"{self._max_connections} requests are at replicas (forward.max_connections)."
            )
        self._num_open += 1

    def _closed(self) -> None:
        self._num_open -= 1

    def abort(self, replica: str, why: type[UpstreamError] = UpstreamTimeout) -> None:
        """Fail requests that wait for their first byte from `replica` and can go elsewhere, now.

        For a replica that was just found dead, hung, asleep or stalled: its requests move on at
        once instead of waiting for their own deadline. A request with nowhere to go keeps waiting:
        what was found may be wrong, and a slow answer is better than none.
        """
        for wait in self._waits.get(replica, ()):
            if not wait.deadline.expired() and wait.may_move_on(why.code):
                wait.end(why)


def _failure(exc: BaseException, replica: str, wait: _Wait) -> RouterError | None:
    """Return the router's error for a request without a first byte; None: `exc` is not of I/O."""
    if isinstance(exc, TimeoutError):
        if wait.ended_as is not SetAside and not wait.is_sent:
            return upstream_error(aiohttp.ConnectionTimeoutError(), replica, "")
        if (why := _WHY.get(wait.ended_as)) is not None:
            return wait.ended_as(replica, f"replica {replica} {why}")
    if isinstance(exc, TimeoutError | aiohttp.ClientError | OSError):
        return upstream_error(exc, replica, "before its first byte")
    return None


def _half_of_descriptors() -> int:
    """Count the requests that find a descriptor: each has one to its client, one to a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft - max(_RESERVED, soft // 8)) // 2)
