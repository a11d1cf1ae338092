"""The client to the replicas: send one request, wait for the first bytes of its answer."""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final, Self

import aiohttp
from aiohttp.connector import Connection
from multidict import CIMultiDict
from yarl import URL

from router.config import ForwardConfig
from router.errors import HandshakeRefused, OutOfConnections, Overdue
from router.replicas.signs import Signs
from router.shortage import shortage
from router.upstream.answer import Answer
from router.upstream.failures import upstream_error
from router.upstream.session import SKIPPED, Response, Session
from router.upstream.socket import CLOSE_S, Socket, UpstreamSocket

_RESERVED: Final = 64  # descriptors for logs, Redis, event streams, probes
_STALE_S: Final = 1.0
"""A closed connection from the pool is noticed within a round trip; a request that fails later had
reached the replica."""


_Request = tuple[str, str, CIMultiDict[str], bytes | None]  # URL, method, headers, body


class _Watch:
    """Asks now and then whether to wait longer, and ends the deadline if not."""

    __slots__ = ("_deadline", "_loop", "_patience", "_timer", "is_over")

    def __init__(
        self, patience: Callable[[], float | None], wait_s: float, deadline: asyncio.Timeout
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._deadline = deadline
        self.is_over = False
        self._timer = self._loop.call_later(wait_s, self._ask)

    def _ask(self) -> None:
        wait_s = self._patience()
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self._ask)
        elif not self._deadline.expired():
            self.is_over = True
            self._deadline.reschedule(0.0)

    def stop(self) -> None:
        self._timer.cancel()


class Upstream:
    """The pooled client to all replicas. Use as an async context manager.

    Args:
        signs_of: Signs of a replica's work. One that is seen at work may be silent for longer than
            the deadlines say.
    """

    def __init__(
        self,
        config: ForwardConfig,
        tls: ssl.SSLContext | None = None,
        signs_of: Callable[[str], Signs] = lambda name: Signs(),
    ) -> None:
        self._config = config
        self._tls = tls
        self._signs_of = signs_of
        self._kept: Session | None = None
        self._fresh: Session | None = None  # keeps no connection
        self._sockets: aiohttp.ClientSession | None = None  # of `_fresh`'s connections
        self._first_bytes: dict[str, dict[asyncio.Timeout, Callable[[], bool]]] = {}
        self._max_connections = config.max_connections or 0
        self._num_open = 0

    async def __aenter__(self) -> Self:
        self._max_connections = self._max_connections or _half_of_descriptors()
        context = self._tls if self._tls is not None else True
        connect_s = self._config.connect_timeout_s
        kept = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=self._config.keepalive_s, ssl=context
        )
        fresh = aiohttp.TCPConnector(limit=0, force_close=True, ssl=context)
        self._kept = Session(kept, connect_timeout_s=connect_s)
        self._fresh = Session(fresh, connect_timeout_s=connect_s)
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_redirect)
        self._sockets = aiohttp.ClientSession(
            connector=fresh,
            connector_owner=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_read=None),
            skip_auto_headers=SKIPPED,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            trace_configs=[redirects],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._kept is not None
        assert self._fresh is not None
        assert self._sockets is not None
        await self._sockets.close()
        await self._kept.close()
        await self._fresh.close()

    async def open(
        self,
        replica: str,
        url: str,
        *,
        method: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        may_move_on: Callable[[], bool] = lambda: True,
        may_resend: bool = True,
        patience: Callable[[], float | None] | None = None,
        patience_s: float = 0.0,
        hold: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> Answer:
        """Send one request and wait for the first bytes of its answer.

        Keep-alive comments of a stream, and white space before another body, are not among them.

        Where a kept connection turns out to have been closed, the request is sent on a new one.

        Args:
            replica: Name for errors and for `abort`.
            url: Absolute, already encoded; sent as it is.
            headers: End-to-end headers, without Host and Content-Length.
            body: Sent as it is; None for none.
            may_move_on: Asked by `abort`: whether this request has somewhere else to go.
            may_resend: Whether it may be sent twice; if not, it goes on a new connection at once.
            patience: Asked while nothing came, first after `patience_s`: how long to wait before it
                is asked again; None: leave now.
            patience_s: See there.
            hold: Reads on until what has come of an answer says enough, under the same deadline.

        Raises:
            Overdue: `patience` returned None.
            UpstreamUnreachable, ConnectTimeout: nothing was sent.
            UpstreamTimeout, UpstreamBroken: nothing of an answer came.
            OutOfConnections: no connection can be made here, to any replica.
        """
        if self._num_open >= self._max_connections:
            raise OutOfConnections(
                f"{self._max_connections} requests are at replicas (forward.max_connections)."
            )
        waiting = self._first_bytes.setdefault(replica, {})
        deadline = asyncio.timeout(None)
        waiting[deadline] = may_move_on
        self._num_open += 1
        signs, limit_s = self._signs_of(replica), self._config.first_byte_timeout_s
        begun_s = time.monotonic()
        watches = [
            _Watch(lambda: signs.wait_s(begun_s, limit_s, time.monotonic()), limit_s, deadline)
        ]
        if patience is not None:
            watches.append(_Watch(patience, patience_s, deadline))
        assert self._kept is not None
        assert self._fresh is not None
        answer: Answer | None = None
        is_sent = False
        try:
            async with deadline:
                session = self._kept if may_resend else self._fresh
                connection, is_kept = await session.connect(url)
                is_sent = True
                request = (url, method, headers, body)
                response, first = await self._send(session, connection, is_kept, request)
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
            if not is_sent and isinstance(exc, TimeoutError):
                raise upstream_error(aiohttp.ConnectionTimeoutError(), replica, "") from exc
            if patience is not None and watches[1].is_over and isinstance(exc, TimeoutError):
                raise Overdue(replica, f"replica {replica} was too late") from exc
            if isinstance(exc, TimeoutError | aiohttp.ClientError | OSError):
                raise upstream_error(exc, replica, "before its first byte") from exc
            raise
        finally:
            del waiting[deadline]
            for watch in watches:
                watch.stop()
        return answer

    async def connect(
        self, replica: str, url: str, *, headers: CIMultiDict[str], max_bytes: int
    ) -> Socket:
        """Open a WebSocket, on a connection of its own.

        Args:
            replica, url, headers: As of `open`.
            max_bytes: Of a message; a larger one ends it.

        Raises:
            HandshakeRefused: it was answered otherwise.
            UpstreamError, OutOfConnections: as `open`.
        """
        assert self._sockets is not None
        if self._num_open >= self._max_connections:
            raise OutOfConnections(
                f"{self._max_connections} requests are at replicas (forward.max_connections)."
            )
        self._num_open += 1
        try:
            async with asyncio.timeout(self._config.first_byte_timeout_s):
                return UpstreamSocket(
                    await self._sockets.ws_connect(
                        URL(url, encoded=True),
                        headers=headers,
                        autoclose=False,
                        compress=0,
                        max_msg_size=max_bytes + 1,  # the least that is refused
                        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    ),
                    self._closed,
                )
        except BaseException as exc:
            self._closed()
            if isinstance(exc, aiohttp.WSServerHandshakeError):
                text = f"replica {replica} answered {exc.status} to a WebSocket"
                raise HandshakeRefused(replica, text, exc.status) from exc
            if isinstance(exc, TimeoutError | aiohttp.ClientError | OSError):
                raise upstream_error(exc, replica, "before its first byte") from exc
            raise

    async def _send(
        self, session: Session, connection: Connection, is_kept: bool, request: _Request
    ) -> tuple[Response, bytes]:
        assert self._fresh is not None
        begun_s = time.monotonic()
        try:
            return await session.exchange(connection, *request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not is_kept or time.monotonic() - begun_s >= _STALE_S:
                raise
        try:
            connection, _ = await self._fresh.connect(request[0])
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            if shortage(exc) is not None:
                raise
            # It died with the request: that one was sent, so this is no plain refusal.
            raise aiohttp.ServerDisconnectedError from exc
        return await self._fresh.exchange(connection, *request)

    def _closed(self) -> None:
        self._num_open -= 1

    def abort(self, replica: str) -> None:
        """Fail requests that wait for their first byte from `replica` and can go elsewhere, now.

        For a replica that a probe has just found dead or hung: its requests move on at once
        instead of waiting for their own deadline. A request with nowhere to go keeps waiting: the
        probe may be wrong, and a slow answer is better than none.
        """
        for deadline, may_move_on in self._first_bytes.get(replica, {}).items():
            if not deadline.expired() and may_move_on():
                deadline.reschedule(0.0)


async def _refuse_redirect(
    _: aiohttp.ClientSession, __: object, params: aiohttp.TraceRequestRedirectParams
) -> None:
    """Go nowhere that an engine says: of WebSockets, aiohttp follows redirects without asking."""
    raise aiohttp.WSServerHandshakeError(
        params.response.request_info, (), status=params.response.status
    )


def _half_of_descriptors() -> int:
    """Count the requests that find a descriptor: each has one to its client, one to a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft - max(_RESERVED, soft // 8)) // 2)
