"""HTTP with replicas: kept connections, one request on one of them, and the head of its response.

Connections, their pool, TLS, the parser and flow control are aiohttp's. Its own session does more
for each request: redirects, cookies, proxies, tracing, a new request object, a task that writes.
That is two thirds of its cost: 168 us of CPU, here 70, for 20 KB and a short answer.

Each answer belongs to one request. Bytes that come on an idle connection belong to none: a late
second answer, the 408 of a load balancer, the rest of a body that was longer than its length said.
The connection is closed, counted and logged, and the next request gets another one. aiohttp keeps
such a connection and gives the bytes to the next request (aiohttp 3.14.5, aio-libs/aiohttp#13656),
whose own answer is then the one after it.

The connector is that of every HTTP client of the router. Names resolve as `router.base.host_names`
says. aiohttp's errors end here: what goes wrong has our own names.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from ssl import SSLContext
from typing import Any, Final, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from router.base.errors import (
    AnswerUnreadable,
    ConnectTimeout,
    HostUnknown,
    OutOfConnections,
    TlsRefused,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.base.host_names import Names
from router.base.system import shortage
from router.config.tls import Tls
from router.config.tls import refusal as tls_refusal

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 16 * 1024
MAX_HEADERS: Final = 128
"""The limits of an answer's head: as the router takes from clients, see `router.http.server`."""

_HEAD_END: Final = b"\r\n\r\n"
_BEGINNING: Final = b"HTTP/"


class Strays:
    """Counts the connections on which bytes came that no request had asked for.

    Args:
        count: Called with the name of the server, once for each connection.
    """

    def __init__(self, count: Callable[[str], None] = lambda server: None) -> None:
        self._count = count
        self._servers: set[str] = set()

    def found(self, server: str) -> None:
        """Count a connection, and log it if it is the server's first one."""
        self._count(server)
        if server not in self._servers:
            self._servers.add(server)
            hint = (
                "the connection is closed and the next request gets another one; a load balancer "
                "or proxy in front of the server may answer idle connections"
            )
            fields = {"server": server, "hint": hint}
            logger.warning("bytes came that no request had asked for", extra=fields)


class Guarded(ResponseHandler):
    """A connection that takes bytes only between a request and the end of its answer.

    server: The name of the server, for logs and metrics; "" stands for its address.
    request_id: The `X-Request-Id` of the last request. None: it had none.
    num_requests: How many requests it has served, this one included.
    has_answer: Whether the head of the final answer has come.
    is_http: Whether what has come begins as an answer does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, strays: Strays) -> None:
        super().__init__(loop=loop)
        self.server = ""
        self.request_id: str | None = None
        self.num_requests = 0
        self.has_answer = self.is_http = False
        self._strays = strays
        self._is_asked = False  # a request is under way
        self._is_begun = False  # bytes of its answer have come
        self._has_stray = False

    def set_response_params(self, **params: Any) -> None:
        """Begin a request: what comes from here on is its answer."""
        self.num_requests += 1
        self.has_answer = self.is_http = self._is_begun = False
        self._is_asked = True
        super().set_response_params(**params)

    def end(self) -> None:
        """End a request: its answer has been read, and no more is to come."""
        if self._buffer or isinstance(self._exception, HttpProcessingError):
            self.refuse()
        self._is_asked = False

    def refuse(self) -> None:
        """Close the connection, because what came on it belongs to no request or to another one."""
        if not self._has_stray:
            self._has_stray = True
            self._strays.found(self.server or _address_of(self.transport))
        if self.transport is not None:
            self.transport.close()

    def is_connected(self) -> bool:
        """Return whether a request is under way or may be sent.

        The socket may have bytes that the loop has not read yet, or its end.
        """
        if not super().is_connected():
            return False
        return self._is_asked or not self._is_readable()

    @property
    def should_close(self) -> bool:
        """Whether the connection cannot serve another request."""
        transport = self.transport
        # What is still to be sent belongs to a request that was answered before its end.
        is_sending = transport is not None and transport.get_write_buffer_size() > 0
        return self._has_stray or is_sending or super().should_close

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:
            if data:
                self.refuse()
            return
        if not self._is_begun and data:
            self._is_begun, self.is_http = True, data.startswith(_BEGINNING[: len(data)])
        # Up to the end of the head first. What follows the whole answer, in the same piece, may be
        # no HTTP, and the parser would lose the answer with it.
        while not self.has_answer and (end := data.find(_HEAD_END)) >= 0:
            end += len(_HEAD_END)
            super().data_received(data[:end])
            data = data[end:]
            if self._exception is not None or not data:
                return
        super().data_received(data)

    def feed_data(
        self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0
    ) -> None:
        """Receive the head of an answer; a final one ends the sending of the request."""
        super().feed_data(data, size)
        if data[0].code < 200:
            return
        self.has_answer = True
        waiter, self._drain_waiter = self._drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _is_readable(self) -> bool:
        """Return whether the socket has bytes, or its end."""
        transport = self.transport
        taken = transport.get_extra_info("socket") if transport is not None else None
        if taken is None or taken.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(taken.fileno(), select.POLLIN)
        if not poll.poll(0):
            return False
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            # Bytes of TLS may be its own.
            with suppress(OSError), socket.socket(fileno=os.dup(taken.fileno())) as copy:
                if copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self.refuse()
        return True


def _address_of(transport: asyncio.BaseTransport | None) -> str:
    """Name a server without a name by its address."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""


class Connector(aiohttp.TCPConnector):
    """A connector whose names keep their last good addresses, and whose connections are guarded.

    Args:
        names: None: names that no other connector shares.
        strays: Counts bytes that no request had asked for. None: they are only logged.
        tls: Its context of the moment is for each new connection. None: the system's authorities.
        server: The name of the only server that it connects to. "": connections are named when
            they are taken.
        limit: The most connections at a time; 0: any number.
        keepalive_timeout: For how long an idle connection is kept, in seconds.
    """

    def __init__(
        self,
        names: Names | None,
        *,
        strays: Strays | None = None,
        tls: Tls | None = None,
        server: str = "",
        limit: int = 0,
        force_close: bool = False,
        keepalive_timeout: float = 15.0,
    ) -> None:
        self._names = names or Names()
        super().__init__(
            resolver=_Resolver(self._names),
            use_dns_cache=False,
            limit=limit,
            force_close=force_close,
            keepalive_timeout=None if force_close else keepalive_timeout,
        )
        self._server = server
        self._tls = tls
        guarded = partial(self._guarded, strays if strays is not None else Strays())
        self._factory = cast("partial[ResponseHandler]", guarded)

    def _get_ssl_context(self, req: aiohttp.ClientRequest) -> SSLContext | None:
        if self._tls is not None and req.is_ssl():
            return self._tls.context
        return super()._get_ssl_context(req)

    @property
    def num_in_use(self) -> int:
        """Count the connections that requests have."""
        return len(self._acquired)

    def _guarded(self, strays: Strays) -> Guarded:
        protocol = Guarded(self._loop, strays)
        protocol.server = self._server
        return protocol

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        if isinstance(protocol, Guarded) and not should_close:
            protocol.end()
        super()._release(key, protocol, should_close=should_close)

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return an idle connection, or a new one; if that fails, the name is asked for again."""
        try:
            return await super().connect(req, traces, timeout)
        except (aiohttp.ClientConnectorError, TimeoutError):
            self._names.doubt(req.url.raw_host or "")
            raise


class _Resolver(AbstractResolver):
    def __init__(self, names: Names) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of both families: no connector here wants one of them."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._names.addresses(host)
        ]

    async def close(self) -> None:
        pass


_LARGE_BODY: Final = 512 * 1024
_PIECE: Final = 256 * 1024
_READ_BYTES: Final = 256 * 1024
_ORIGINS: Final = 1024
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_SWITCHING_PROTOCOLS: Final = 101
_REQUEST_TIMEOUT: Final = 408
_BEGINNING_BYTES: Final = 256  # of an answer that names its request; vLLM begins with the name
_URL: Final = re.compile(r"([^:/?#]+://[^/?#]+)([^#]*)")


class StrayAnswer(aiohttp.ClientPayloadError):
    """What came on a kept connection is not the answer to this request."""


class UnreadableHead(aiohttp.ClientPayloadError):
    """An answer came, and its head cannot be read or exceeds the limits."""


class Response:
    """A response whose head has come; close it in the end."""

    __slots__ = ("connection", "content", "headers", "status")

    def __init__(
        self, connection: Connection, message: RawResponseMessage, content: aiohttp.StreamReader
    ) -> None:
        self.connection = connection
        self.status = message.code
        self.headers = message.headers
        self.content = content

    def close(self) -> None:
        """Release the connection, or cut it where the body has not come to its end."""
        if self.content.is_eof():
            self.connection.release()
        else:
            self.connection.close()


class HttpSession:
    """Connections to replicas.

    Args:
        connector: Owned: closed with the session.
    """

    def __init__(self, connector: Connector, *, connect_timeout_s: float) -> None:
        self.connector = connector
        self._loop = asyncio.get_running_loop()
        # Of the name, the connection and TLS together.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._origin_of = lru_cache(maxsize=_ORIGINS)(_origin)

    async def close(self) -> None:
        """Close all connections."""
        await self.connector.close()

    async def connect(self, url: str, server: str) -> tuple[Connection, bool]:
        """Return a connection, and whether it has served a request before.

        Args:
            url: Of the request.
            server: Its name, for logs and metrics.

        Raises:
            aiohttp.ConnectionTimeoutError: none was made in time.
            aiohttp.ClientError, OSError: none can be made.
        """
        origin = self._origin_of(_split(url)[0])
        try:
            connection = await self.connector.connect(origin, [], self._timeout)
        except TimeoutError as exc:  # the connector's own, which says no more than that
            raise aiohttp.ConnectionTimeoutError from exc
        protocol = connection.protocol
        assert isinstance(protocol, Guarded)
        protocol.server = server
        return connection, protocol.num_requests > 0

    async def exchange(
        self,
        connection: Connection,
        url: str,
        method: str,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> tuple[Response, bytes]:
        """Send a request; return the response, and the first bytes of its body.

        Args:
            connection: Taken for this URL; closed where there is no response.
            headers: Without Host and Content-Length.

        Raises:
            aiohttp.ServerDisconnectedError, aiohttp.ClientOSError: the connection broke off before
                a head came.
            StrayAnswer: what came belongs to no request, or to another one.
            UnreadableHead: an answer came, but its head cannot be read.
            aiohttp.ClientPayloadError: the connection broke off later, or this was no HTTP.
            ValueError: a header has a control character in it.
        """
        protocol = connection.protocol
        assert isinstance(protocol, Guarded)
        base, target = _split(url)
        lines = self._origin_of(base).headers.copy()  # Host
        lines.extend(headers)
        if body is not None or method not in _BODILESS:
            lines["Content-Length"] = str(len(body or b""))
        if self.connector.force_close and "Upgrade" not in lines:
            lines["Connection"] = "close"
        try:
            protocol.set_response_params(
                skip_payload=method == "HEAD",
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=_READ_BYTES,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
                max_headers=MAX_HEADERS,
            )
            writer = StreamWriter(protocol, self._loop)
            await writer.write_headers(f"{method} {target} HTTP/1.1", lines)
            await _write(writer, body or b"", protocol)
            message, content = await protocol.read()
            while message.code < 200:
                if message.code == _SWITCHING_PROTOCOLS:
                    raise aiohttp.ClientPayloadError("an upgrade that nobody asked for")
                message, content = await protocol.read()
        except HttpProcessingError as exc:
            if protocol.is_http:
                connection.close()
                raise UnreadableHead(exc.message) from exc
            if protocol.num_requests > 1:
                protocol.refuse()
                connection.close()
                raise StrayAnswer from exc
            connection.close()
            raise aiohttp.ClientPayloadError("this is not an HTTP response") from exc
        except BaseException:
            connection.close()
            raise
        response = Response(connection, message, content)
        before, protocol.request_id = protocol.request_id, headers.get("X-Request-Id")
        try:
            first = await content.readany()
            if protocol.num_requests > 1 and (
                message.code == _REQUEST_TIMEOUT
                or (before != protocol.request_id and _names(before, message, first))
            ):
                protocol.refuse()
                raise StrayAnswer
            return response, first
        except BaseException as exc:
            response.close()
            if isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
                # Its head came: that was no connection that had been closed before.
                raise aiohttp.ClientPayloadError from exc
            raise


def _names(request_id: str | None, message: RawResponseMessage, first: bytes) -> bool:
    """Return whether an answer names a request, in a header or at its beginning.

    Source: vLLM 0.32 entrypoints/serve/engine/serving.py (`_base_request_id`), and the header of
    `--enable-request-id-headers`.
    """
    if request_id is None:
        return False
    if message.headers.get("X-Request-Id") == request_id:
        return True
    return b'cmpl-%b"' % request_id.encode() in first[:_BEGINNING_BYTES]


async def _write(writer: StreamWriter, body: bytes, protocol: Guarded) -> None:
    """Write a body behind its headers; a large one in pieces: one write would hold the loop.

    A server may answer, and close, before it has read it all: whether it did, its answer shows.
    The rest is then not sent, and the connection serves no other request.
    """
    if len(body) <= _LARGE_BODY:
        await writer.write_eof(body)
        return
    view = memoryview(body)
    with suppress(ConnectionError):
        for start in range(0, len(body), _PIECE):
            if protocol.has_answer:
                protocol.force_close()
                return
            await writer.write(view[start : start + _PIECE])


def _origin(base: str) -> aiohttp.ClientRequest:
    """Return what aiohttp's connector wants to know of a server: a request to it, never sent."""
    skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
    return aiohttp.ClientRequest("GET", URL(base), skip_auto_headers=skipped)


def _split(url: str) -> tuple[str, str]:
    """Split a URL into its server and the target of a request there, which has no fragment."""
    parts = _URL.match(url)
    if parts is None:
        raise aiohttp.InvalidURL(url)
    base, target = parts.groups()
    return base, target if target.startswith("/") else f"/{target}"


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


_NO_ROUTE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


def upstream_error(exc: Exception, replica: str, when: str) -> UpstreamError | OutOfConnections:
    """Turn aiohttp's and the system's errors into ours, most specific first."""
    if (short_of := shortage(exc)) is not None:
        return OutOfConnections(f"The router cannot open a connection now ({short_of}).")
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return ConnectTimeout(replica, f"replica {replica} did not accept a connection in time")
    if isinstance(exc, TimeoutError):
        return UpstreamTimeout(replica, f"replica {replica} sent nothing {when}")
    if (why := tls_refusal(exc)) is not None:
        return TlsRefused(replica, f"replica {replica}: {why}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        return unreachable(exc, replica, f"replica {replica}")
    if isinstance(exc, UnreadableHead):
        return AnswerUnreadable(replica, f"replica {replica}: the head of its answer: {exc}")
    return UpstreamBroken(replica, f"replica {replica} failed {when} ({type(exc).__name__})")


def unreachable(exc: aiohttp.ClientConnectorError, replica: str, what: str) -> UpstreamUnreachable:
    """Turn a connection that did not come about into our error; `what` begins its message."""
    cause = exc.os_error
    if isinstance(cause, socket.gaierror):
        reason = cause.strerror or "unknown"
        return HostUnknown(replica, f"{what}: its host name does not resolve ({reason})")
    if cause.errno in _NO_ROUTE:
        return UpstreamUnreachable(replica, f"{what} cannot be reached: {cause.strerror}")
    return UpstreamUnreachable(replica, f"{what} refused the connection")
