"""Connections to others: kept ones, of which each answer belongs to one request.

Bytes that come on an idle connection belong to no request. Examples are a late second answer, the
408 of a load balancer, and the rest of a body that was longer than its length said. The connection
is closed, counted and logged, and the next request gets another one.

aiohttp keeps such a connection and gives the bytes to the next request (aiohttp 3.14.5,
aio-libs/aiohttp#13656), whose own answer is then the one after it.

The connector is that of every HTTP client of the router. Names resolve as `router.base.host_names`
says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ssl import SSLContext
from typing import Any, Final, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError

from router.base.host_names import Names
from router.config.tls import Tls

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
