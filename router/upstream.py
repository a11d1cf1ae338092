"""HTTP to the replicas: one request, a deadline per phase, failures as our own errors.

An answer is returned with its first body bytes already read: up to there a failure costs the
client nothing and the data path moves on. aiohttp's errors end here.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from router.config import ForwardConfig
from router.errors import (
    ConnectTimeout,
    OutOfConnections,
    Overdue,
    TlsRefused,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.shortage import shortage
from router.tls import refusal as tls_refusal

_LARGE_BODY: Final = 512 * 1024
_PIECE: Final = 256 * 1024
_RESERVED: Final = 64  # descriptors for logs, Redis, event streams, probes
_STALE_S: Final = 1.0
"""A closed connection from the pool is noticed within a round trip; a request that fails later had
reached the replica."""
_SKIPPED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# Source: RFC 9110 section 7.6.1, and what RFC 2616 named; lower case.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

Headers = Iterable[tuple[str, str]]


def end_to_end(
    headers: Headers, *, drop: frozenset[str] = frozenset(), drop_prefix: str
) -> CIMultiDict[str]:
    """Copy headers without the hop-by-hop ones, those `Connection` names, and what to drop."""
    kept: CIMultiDict[str] = CIMultiDict()
    named: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            named.update(part.strip().lower() for part in value.split(","))
        if lower not in HOP_BY_HOP and lower not in drop and not lower.startswith(drop_prefix):
            kept.add(name, value)
    for name in named:
        kept.popall(name, None)
    return kept


class Answer:
    """A replica's answer, its first bytes read. Close it in a `finally`."""

    __slots__ = (
        "_idle_s",
        "_idle_timer",
        "_loop",
        "_on_close",
        "_replica",
        "_response",
        "_waits_since_s",
        "error_status",
        "first",
        "first_s",
        "headers",
        "status",
    )

    def __init__(
        self,
        replica: str,
        response: aiohttp.ClientResponse,
        first: bytes,
        idle_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self._on_close: Callable[[], None] | None = on_close
        self._replica = replica
        self._response = response
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None  # None: no one waits for the next bytes
        self.status = response.status
        self.headers = response.headers
        self.first = first
        self.first_s: float | None = None  # of the first token or byte, by the caller's clock
        self.error_status: int | None = None  # of a stream whose first event is an error

    @property
    def outcome_status(self) -> int:
        """The status of the outcome: a stream's own error, else HTTP's."""
        return self.error_status or self.status

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self._response.content_type == "text/event-stream"

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        return self._response.content.at_eof()

    async def gather(self, limit_bytes: int) -> None:
        """Read the rest of the body into `first`, up to about `limit_bytes`.

        Raises:
            UpstreamBroken, UpstreamTimeout: the answer broke off.
        """
        parts = [self.first]
        num_bytes = len(self.first)
        while num_bytes < limit_bytes and not self.complete:
            chunk = await self._next()
            parts.append(chunk)
            num_bytes += len(chunk)
        self.first = b"".join(parts)

    async def read_on(self, wait_s: float) -> bool:
        """Read the next piece into `first`; False, and nothing lost, if none comes in time.

        Raises:
            UpstreamBroken, UpstreamTimeout: the answer broke off.
        """
        if wait_s <= 0.0:
            return False
        deadline = asyncio.timeout(wait_s)
        try:
            async with deadline:
                self.first += await self._next()
        except TimeoutError:
            return False
        return True

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body after `first`, as it arrives.

        Raises:
            UpstreamBroken, UpstreamTimeout: after what was yielded the answer broke off.
        """
        while not self.complete:
            chunk = await self._next()
            if chunk:
                yield chunk

    async def _next(self) -> bytes:
        self._waits_since_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)
        try:
            return await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise _named(exc, self._replica, "inside its answer") from exc
        finally:
            self._waits_since_s = None

    def _check_idle(self) -> None:
        """Fail a read that has waited for too long, else check again when it would have.

        One timer for the whole answer: a deadline around each event's read was a fifth of what
        passing the event on costs.
        """
        now_s = self._loop.time()
        since_s = now_s if self._waits_since_s is None else self._waits_since_s
        left_s = since_s + self._idle_s - now_s
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._check_idle)
        else:
            self._response.content.set_exception(TimeoutError())

    def close(self) -> None:
        """Give the connection back, or cut it where the answer was not read to its end."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


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
                raise _named(exc, replica, "before its first byte") from exc
            raise
        finally:
            del waiting[deadline]
            if watch is not None:
                watch.stop()
        return Answer(replica, response, first, self._config.idle_timeout_s, self._closed)

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


def _named(exc: Exception, replica: str, when: str) -> UpstreamError | OutOfConnections:
    """Turn aiohttp's and the system's errors into ours, most specific first."""
    if (short_of := shortage(exc)) is not None:
        return OutOfConnections(f"This router cannot open a connection now ({short_of}).")
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return ConnectTimeout(replica, f"replica {replica} did not accept a connection in time")
    if isinstance(exc, TimeoutError):
        return UpstreamTimeout(replica, f"replica {replica} was silent {when}")
    if (why := tls_refusal(exc)) is not None:
        return TlsRefused(replica, f"replica {replica}: {why}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        return UpstreamUnreachable(replica, f"replica {replica} refused the connection")
    return UpstreamBroken(replica, f"replica {replica} broke off {when} ({type(exc).__name__})")
