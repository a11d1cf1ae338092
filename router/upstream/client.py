"""The client to the replicas: send one request, wait for the first bytes of its answer."""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Final, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from router.config import ForwardConfig
from router.errors import HandshakeRefused, OutOfConnections, Overdue
from router.shortage import shortage
from router.upstream.answer import Answer
from router.upstream.failures import upstream_error
from router.upstream.socket import CLOSE_S, Socket, UpstreamSocket

_LARGE_BODY: Final = 512 * 1024
_PIECE: Final = 256 * 1024
_RESERVED: Final = 64  # descriptors for logs, Redis, event streams, probes
_STALE_S: Final = 1.0
"""A closed connection from the pool is noticed within a round trip; a request that fails later had
reached the replica."""
_SKIPPED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class _Use:
    """The connection that one request used."""

    __slots__ = ("is_kept",)

    def __init__(self) -> None:
        self.is_kept = False  # it had served another request before


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
    """The pooled client to all replicas. Use as an async context manager."""

    def __init__(self, config: ForwardConfig, tls: ssl.SSLContext | None = None) -> None:
        self._config = config
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._fresh_session: aiohttp.ClientSession | None = None  # keeps no connection
        self._first_bytes: dict[str, dict[asyncio.Timeout, Callable[[], bool]]] = {}
        self._max_connections = config.max_connections or 0
        self._num_open = 0

    async def __aenter__(self) -> Self:
        self._max_connections = self._max_connections or _half_of_descriptors()
        context = self._tls if self._tls is not None else True
        kept = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=self._config.keepalive_s, ssl=context
        )
        self._session = self._client(kept)
        self._fresh_session = self._client(
            aiohttp.TCPConnector(limit=0, force_close=True, ssl=context)
        )
        return self

    def _client(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        uses = aiohttp.TraceConfig()
        uses.on_connection_reuseconn.append(_note_kept)
        uses.on_request_redirect.append(_refuse_redirect)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.connect_timeout_s, sock_read=None
            ),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=256 * 1024,
            trace_configs=[uses],
        )

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        assert self._fresh_session is not None
        await self._session.close()
        await self._fresh_session.close()

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
    ) -> Answer:
        """Send one request and wait for the first bytes of its answer.

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

        Raises:
            Overdue: `patience` returned None.
            UpstreamUnreachable, UpstreamTimeout, UpstreamBroken: nothing of an answer came.
            OutOfConnections: no connection can be made here, to any replica.
        """
        if self._num_open >= self._max_connections:
            raise OutOfConnections(
                f"{self._max_connections} requests are at replicas (forward.max_connections)."
            )
        if body is not None and len(body) > _LARGE_BODY:
            # Sent in pieces: one write of megabytes would hold the loop; the length stays declared.
            headers["Content-Length"] = str(len(body))
        waiting = self._first_bytes.setdefault(replica, {})
        deadline = asyncio.timeout(self._config.first_byte_timeout_s)
        waiting[deadline] = may_move_on
        self._num_open += 1
        watch = _Watch(patience, patience_s, deadline) if patience is not None else None
        try:
            async with deadline:
                response, first = await self._send(url, method, headers, body, may_resend)
        except BaseException as exc:
            self._closed()
            if watch is not None and watch.is_over and isinstance(exc, TimeoutError):
                raise Overdue(replica, f"replica {replica} was overdue") from exc
            if isinstance(exc, TimeoutError | aiohttp.ClientError | OSError):
                raise upstream_error(exc, replica, "before its first byte") from exc
            raise
        finally:
            del waiting[deadline]
            if watch is not None:
                watch.stop()
        return Answer(replica, response, first, self._config.idle_timeout_s, self._closed)

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
        assert self._fresh_session is not None
        if self._num_open >= self._max_connections:
            raise OutOfConnections(
                f"{self._max_connections} requests are at replicas (forward.max_connections)."
            )
        self._num_open += 1
        try:
            async with asyncio.timeout(self._config.first_byte_timeout_s):
                return UpstreamSocket(
                    await self._fresh_session.ws_connect(
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
        self,
        url: str,
        method: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        may_resend: bool,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        assert self._session is not None
        assert self._fresh_session is not None
        if not may_resend:
            return await _exchange(self._fresh_session, url, method, headers, body, _Use())
        use, begun_s = _Use(), time.monotonic()
        try:
            return await _exchange(self._session, url, method, headers, body, use)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
            is_stale = use.is_kept and time.monotonic() - begun_s < _STALE_S
            if isinstance(exc, aiohttp.ClientConnectorError) or not is_stale:
                raise
        try:
            return await _exchange(self._fresh_session, url, method, headers, body, _Use())
        except aiohttp.ClientConnectorError as exc:
            if shortage(exc) is not None:
                raise
            # It died with the request: that one was sent, so this is no plain refusal.
            raise aiohttp.ServerDisconnectedError from exc

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


async def _exchange(
    session: aiohttp.ClientSession,
    url: str,
    method: str,
    headers: CIMultiDict[str],
    body: bytes | None,
    use: _Use,
) -> tuple[aiohttp.ClientResponse, bytes]:
    """Send a request; return the response and the first bytes of its body."""
    data: Any = body if body is None or len(body) <= _LARGE_BODY else _pieces(body)
    response = await session.request(
        method,
        URL(url, encoded=True),
        headers=headers,
        data=data,
        allow_redirects=False,
        trace_request_ctx=use,
    )
    try:
        return response, await response.content.readany()
    except BaseException as exc:
        response.close()
        if isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
            # Its head came: that was no connection that had been closed before.
            raise aiohttp.ClientPayloadError from exc
        raise


async def _refuse_redirect(
    _: aiohttp.ClientSession, __: object, params: aiohttp.TraceRequestRedirectParams
) -> None:
    """Go nowhere that an engine says: of WebSockets, aiohttp follows redirects without asking."""
    raise aiohttp.WSServerHandshakeError(
        params.response.request_info, (), status=params.response.status
    )


async def _note_kept(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.is_kept = True


def _half_of_descriptors() -> int:
    """Count the requests that find a descriptor: each has one to its client, one to a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft - max(_RESERVED, soft // 8)) // 2)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), _PIECE):
        yield bytes(view[start : start + _PIECE])
