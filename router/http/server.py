"""The server: accepted sockets become connections, within limits, until the router ends.

A `Connection` is aiohttp's HTTP/1.1 protocol, with our errors and a view for the `Listener`. Its
requests go to the application. Bytes that are not HTTP are answered here, in the API's error shape,
and never quoted: neither to the client nor in the log.

The socket is accepted here, not by the loop: uvloop closes a listening socket for good, without a
word, when accept says that descriptors are used up. What is refused or cut is counted by reason:

    limit                  more connections than limits.connections: a 503
    descriptors            no descriptor is left: the rest waits in the kernel's queue for a second
    header_timeout         nothing, or no whole headers, within 15 s
    write_timeout          took nothing for limits.write_timeout_s
    tls                    no handshake within 15 s, or a wrong one
    not_http               sent what is no request
    broken                 was gone before it was there

A router ends in three phases, without losing an answer that can still be given:

1 leaving   /readyz answers 503, and each answer ends its connection. Everything is served, so that
            front ends can notice. On a shared port the other routers accept new connections.

2 draining  no new connection is accepted; answers in flight are finished

3 cut       the rest gets an error in its API's shape, and is closed
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from router.api.answers import error_body, error_headers
from router.base.addresses import own_url_host
from router.base.errors import (
    BadRequest,
    ConfigError,
    HeadersTooLarge,
    Overloaded,
    RouterError,
    ShuttingDown,
)
from router.base.listening import BACKLOG, cannot_listen, listen, why_not
from router.config import LimitsConfig, ListenConfig
from router.config.tls import Tls
from router.http.exchange import InternalError, error_answer, without_message
from router.metrics import Metrics

logger = logging.getLogger(__name__)

HEADER_BYTES: Final = 16_384
"""Largest line of a request's head."""

HEADER_TIMEOUT_S: Final = 15.0
"""Time a new connection has to send its first headers."""

_GONE: Final = frozenset({errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ECONNRESET})
_ACCEPTS_AT_ONCE: Final = 64
_ACCEPT_AGAIN_S: Final = 1.0
_FIRST_REQUEST_S: Final = 1.0  # while the router ends: for a connection that has just come
_LOOK_S: Final = 1.0
_LOOKS_AT_ONCE: Final = 500
_LOG_AGAIN_S: Final = 10.0
_READ_BYTES: Final = 1024 * 1024  # of a body before its socket is paused: most come in one piece
_MAX_HEADERS: Final = 128
_SHUTDOWN_S: Final = 0.1
_LINGER_S: Final = 5.0  # what a refused client goes on sending is read for so long


# Source: struct tcp_info in linux/tcp.h since 4.1: u64 tcpi_bytes_acked at offset 120.
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED: Final = struct.Struct("@Q")
_BYTES_ACKED_AT: Final = 120


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers requests."""


class Request(web.BaseRequest):
    """A request of a port that has no `web.Application`: that would cost a fifth of an answer."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        connection = self.protocol
        assert isinstance(connection, Connection)
        connection.owner.answers(self, response)


class Connection(web.RequestHandler):
    """A connection of the public or the admin port.

    Args:
        manager: aiohttp's server, which has the application.
        owner: The listener.
        wire: The accepted socket: it knows what the client's kernel has taken.
        address: The client's, for the owner's log.
    """

    __slots__ = ("_acked", "_stalled_since_s", "_wire", "address", "opened_s", "owner", "stream")

    def __init__(
        self,
        manager: web.Server,
        *,
        owner: Listener,
        wire: socket.socket,
        address: str,
        **options: Any,
    ) -> None:
        super().__init__(manager, **options)
        self.owner = owner
        self._wire = wire
        self._acked = -1
        self._stalled_since_s: float | None = None  # None: nothing waits to be taken
        self.address = address
        self.opened_s = 0.0
        # Kept when aiohttp drops its own reference: unsent bytes outlive the request.
        self.stream: asyncio.Transport | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, answered or in line."""
        return self.stream is None or (self._waiter is not None and not self._messages)

    @property
    def is_busy(self) -> bool:
        """Whether the client is still to get something: an answer, or the rest of one."""
        waits = self.stream is not None and self.stream.get_write_buffer_size() > 0
        return waits or not self.is_idle

    @property
    def is_new(self) -> bool:
        """Whether not even the headers of a first request came."""
        return self._request_count == 0

    @property
    def has_unread(self) -> bool:
        """Whether bytes of the client's, or its end, wait in the kernel."""
        if self.stream is None or self.stream.is_closing():
            return False
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        return bool(poll.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.stream = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        self.opened_s = time.monotonic()
        self.owner.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.stream = None
        self.owner.closed(self)
        super().connection_lost(exc)

    def stalled_s(self, now_s: float) -> float:
        """Return for how long the client has taken nothing of what waits for it; ask now and then.

        Counted by what its kernel acknowledged: what fits into the buffers in between would hide
        for minutes that a slow client does read.
        """
        if self.stream is None or self.stream.get_write_buffer_size() == 0:
            self._stalled_since_s = None
            return 0.0
        acked = self._num_acked()
        if self._stalled_since_s is None or acked != self._acked:
            self._acked, self._stalled_since_s = acked, now_s
        return now_s - self._stalled_since_s

    def _num_acked(self) -> int:
        """Count the bytes that the client's kernel has; elsewhere than on Linux, what is left."""
        if _TCP_INFO is not None:
            try:
                info = self._wire.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            except OSError:
                return -1
            if len(info) >= _BYTES_ACKED_AT + _BYTES_ACKED.size:
                return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)[0])
        return self.stream.get_write_buffer_size() if self.stream is not None else -1

    def abort(self) -> None:
        """Cut the connection; what was not sent is thrown away."""
        if self.stream is not None:
            self.stream.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request, or what our own bug left unanswered, quoting neither."""
        error: RouterError
        if status == 500:
            self.log_exception("internal error", exc_info=exc)
            error = InternalError("internal error; see the router's log")
        else:
            self.owner.not_http(self, type(exc).__name__)
            error = _refusal(exc, self.max_field_size)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has already started")
        response = error_answer(error, request.path)
        response.force_close()
        return response

    def log_exception(self, *_: Any, exc_info: Any = None, **__: Any) -> None:
        """Log where it happened, never the message: that may quote the request."""
        if isinstance(exc_info, BaseException):
            exc_info = without_message(exc_info)
        self.logger.error("internal error", exc_info=exc_info)


class Listener:
    """One port: its socket, its connections and their limits.

    Args:
        name: For the log.
        app: A handler alone is 20 us a request cheaper than an application with routes.
        max_connections: More are refused.
        tls: None: plain HTTP.
    """

    def __init__(
        self,
        name: str,
        app: web.Application | Handler,
        *,
        limits: LimitsConfig,
        max_connections: int,
        metrics: Metrics,
        tls: Tls | None,
    ) -> None:
        self.name = name
        self._limits = limits
        self._max_connections = max_connections
        self._metrics = metrics
        self._tls = tls
        self._app = app
        self._runner: web.AppRunner | web.ServerRunner | None = None  # None: not started
        self._sockets: list[socket.socket] = []
        self.connections: set[Connection] = set()
        self._num_wires = 0  # accepted and not gone, in a handshake or connected
        self._is_leaving = False
        self._handshakes: set[asyncio.Task[None]] = set()
        self._refusals = _Refusals(name, metrics)
        self._tg: asyncio.TaskGroup | None = None

    def bind(self, host: str, port: int, *, shared: bool = False) -> str:
        """Bind the port; return its base URL. Nothing is accepted yet.

        Args:
            shared: Others may have it, too; no connection comes before `start`.

        Raises:
            ConfigError: it cannot be had.
        """
        try:
            self._sockets += listen(host, port, shared=shared)
        except OSError as exc:
            why = why_not(host, exc)
            if exc.errno == errno.EADDRINUSE and self.name == "admin":
                why += "; each router needs an admin port of its own (--admin-port PORT)"
            elif exc.errno == errno.EADDRINUSE:
                why += "; `warmroute check` says whether a router has it (--port PORT: another)"
            raise ConfigError(cannot_listen(host, port, why)) from exc
        scheme = "https" if self._tls is not None else "http"
        return f"{scheme}://{own_url_host(host)}:{self._port}"

    @property
    def is_listening(self) -> bool:
        """Whether connections are accepted."""
        return self._tg is not None and bool(self._sockets)

    @property
    def _port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    async def start(self, tg: asyncio.TaskGroup) -> None:
        """Serve, with tasks in `tg`, until `close`."""
        self._runner = self._build_runner()
        await self._runner.setup()
        self._tg = tg
        for listening in self._sockets:
            listening.listen(BACKLOG)  # for the first time where the port is shared
        self._listen()

    def _build_runner(self) -> web.AppRunner | web.ServerRunner:
        app = self._app
        if isinstance(app, web.Application):
            app.on_response_prepare.append(self._on_answer)
            return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        # A client that leaves cancels its request at once.
        server = web.Server(app, request_factory=_request, handler_cancellation=True)
        return web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)

    async def watch(self) -> None:
        """Cut clients that send no headers or take no answers; runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            connections = list(self.connections)
            for start in range(0, len(connections), _LOOKS_AT_ONCE):
                now_s = time.monotonic()
                for connection in connections[start : start + _LOOKS_AT_ONCE]:
                    self._look_at(connection, now_s)
                await asyncio.sleep(0)

    def _look_at(self, connection: Connection, now_s: float) -> None:
        if connection.stalled_s(now_s) >= self._limits.write_timeout_s:
            self._refusals.add("write_timeout", connection.address)
            connection.abort()
        elif (
            connection.is_new
            and connection.is_idle
            and now_s - connection.opened_s >= HEADER_TIMEOUT_S
        ):
            self._refusals.add("header_timeout", connection.address)
            connection.force_close()

    # ---------------------------------------------------------------- accepting

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        assert self._tg is not None
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                wire, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in _GONE:
                    continue
                # Whatever it is, it is ours: the listening socket stays.
                self._refusals.add("descriptors", exc.strerror or type(exc).__name__)
                self._pause()
                return
            wire.setblocking(False)
            host = str(address[0])
            if self._num_wires >= self._max_connections:
                self._turn_away(wire, host)
            else:
                self._num_wires += 1
                task = self._tg.create_task(self._connect(wire, host), name=f"accept {self.name}")
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)

    def _pause(self) -> None:
        """Leave new connections in the kernel's queue for a while: accepting fails at once, again.

        What is open goes on, and gives descriptors back.
        """
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening.fileno())
        loop.call_later(_ACCEPT_AGAIN_S, self._resume)

    def _resume(self) -> None:
        self._listen()  # nothing, if the sockets are closed meanwhile

    async def _connect(self, wire: socket.socket, host: str) -> None:
        """Make an accepted socket a connection; with TLS, shake hands first."""
        assert self._runner is not None
        server = self._runner.server
        connection: Connection | None = None

        def create() -> Connection:
            nonlocal connection
            assert server is not None
            connection = Connection(
                server,
                owner=self,
                wire=wire,
                address=host,
                loop=asyncio.get_running_loop(),
                access_log=None,
                logger=logger,
                keepalive_timeout=self._limits.keepalive_timeout_s,
                max_line_size=HEADER_BYTES,
                max_field_size=HEADER_BYTES,
                max_headers=_MAX_HEADERS,
                lingering_time=_LINGER_S,
                auto_decompress=False,  # the body goes on as it came
                read_bufsize=_READ_BYTES,
            )
            return connection

        tls = self._tls.context if self._tls is not None else None
        timeout_s = HEADER_TIMEOUT_S if tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                create, wire, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except Exception as exc:  # a client's: nothing of it may end the router
            self._refusals.add("tls" if self._tls is not None else "broken", _tls_reason(exc))
        finally:
            if connection is None or connection.opened_s == 0.0:  # it never was a connection
                wire.close()
                self._num_wires -= 1

    def _turn_away(self, wire: socket.socket, host: str) -> None:
        """Answer that there is no room; unread bytes of the client's would make it see a reset."""
        self._refusals.add("limit", host)
        if self._tls is None:
            with suppress(OSError):
                wire.recv(65_536, socket.MSG_DONTWAIT)
            with suppress(OSError):
                wire.send(_NO_ROOM)
                wire.shutdown(socket.SHUT_WR)
        wire.close()

    # ---------------------------------------------------------------- what connections report

    def opened(self, connection: Connection) -> None:
        """Record that a connection can be used."""
        self.connections.add(connection)
        self._metrics.connections.inc()

    def closed(self, connection: Connection) -> None:
        """Record that a connection that was opened is gone."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._metrics.connections.dec()
            self._num_wires -= 1

    def not_http(self, connection: Connection, kind: str) -> None:
        """Record that a client sent what is no request; `kind` is the parser's name for it."""
        self._refusals.add("not_http", kind)

    # ---------------------------------------------------------------- ending

    async def _on_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        self.answers(request, response)

    def answers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Close the connection after an answer that is its last.

        The router is to end; or the body was refused unread: what comes next may be it, or not.
        """
        if self._is_leaving or not request.content.is_eof():
            response.force_close()
            response.headers["Connection"] = "close"

    def leave(self) -> None:
        """From now on each answer is its connection's last; new connections are still taken."""
        self._is_leaving = True

    def take_queued(self) -> None:
        """Accept the connections that the kernel has queued: closing would reset what they ask."""
        for listening in self._sockets:
            for _ in range(0, BACKLOG, _ACCEPTS_AT_ONCE):
                self._accept(listening)

    def close(self) -> None:
        """Stop taking new connections."""
        self._is_leaving = True
        self._close_sockets()

    def close_idle(self) -> int:
        """Close connections without a request; count the others."""
        now_s = time.monotonic()
        num_busy = len(self._handshakes) if self._tls is None else 0  # TLS: may take its time
        for connection in list(self.connections):
            may_ask = connection.is_new and now_s - connection.opened_s < _FIRST_REQUEST_S
            if not connection.is_idle or may_ask or connection.has_unread:
                num_busy += 1
                continue
            connection.force_close()
            num_busy += connection.is_busy
        return num_busy

    async def end(self) -> None:
        """Cut what is left."""
        self.close()
        for task in self._handshakes:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        if self._runner is not None:
            await self._runner.cleanup()

    def _close_sockets(self) -> None:
        for listening in self._sockets:
            if self._tg is not None:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            listening.close()
        self._sockets.clear()


class _Refusals:
    """Counts refused and cut connections, and logs some: a flood of them must not flood the log."""

    __slots__ = ("_logged_s", "_metrics", "_num_unlogged", "_port")

    def __init__(self, port: str, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._logged_s: dict[str, float] = {}  # reason -> when it was last logged
        self._num_unlogged: Counter[str] = Counter()

    def add(self, reason: str, what: str) -> None:
        """Count a connection; log the first of a reason, then one every 10 s."""
        self._metrics.connections_ended.labels(reason).inc()
        now_s = time.monotonic()
        if now_s - self._logged_s.get(reason, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
            self._num_unlogged[reason] += 1
            return
        self._logged_s[reason] = now_s
        logger.warning(
            "client connections refused or cut",
            extra={
                "port": self._port,
                "reason": reason,
                "such_as": what,
                "num_more_before": self._num_unlogged.pop(reason, 0),
            },
        )


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> Request:
    return Request(message, payload, protocol, writer, task, asyncio.get_running_loop())


def _refusal(exc: BaseException | None, header_bytes: int) -> RouterError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge(f"the request line or a header is longer than {header_bytes} bytes")
    if isinstance(exc, BadHttpMessage) and exc.message.startswith("Too many headers"):
        return HeadersTooLarge("the request has too many headers")
    if isinstance(exc, BadHttpMessage):
        if twice := re.match(r"Duplicate '([\w-]+)' header", exc.message):
            return BadRequest(f"the request has two {twice[1]} headers")
    return BadRequest("the request is not HTTP/1.1")


def _tls_reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or type(exc).__name__


def _no_room() -> bytes:
    error = Overloaded("too many connections (limits.connections); try again in a moment")
    body = error_body(error, "")
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    } | error_headers(error)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{lines}\r\n".encode() + body


_NO_ROOM: Final = _no_room()


_LEAVING_LOOK_S: Final = 0.02
_LAST_WORDS_S: Final = 1.0  # to write errors

_T = TypeVar("_T")


class Draining:
    """Ends what listeners serve, in order; see `run`."""

    def __init__(self, config: ListenConfig) -> None:
        self._config = config
        self._deadlines: set[asyncio.Timeout] = set()
        self._grace_s = config.drain_grace_s
        self._now = asyncio.Event()
        self._is_cut = False
        self.reason: str | None = None  # why requests should go elsewhere; None: they may come

    async def until_cut(self, work: Awaitable[_T]) -> _T:
        """Wait for a part of a request's work.

        Raises:
            ShuttingDown: the router ends first.
        """
        try:
            async with asyncio.timeout(0 if self._is_cut else None) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await work
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if deadline.expired():
                raise ShuttingDown("the router is shutting down; send the request again") from None
            raise

    def skip_grace(self) -> None:
        """Leave the first phase out: a person at a terminal has no front end that must notice."""
        self._grace_s = 0.0

    def end_now(self) -> None:
        """Wait no longer, whatever phase it is."""
        self._now.set()

    async def run(self, listener: Listener) -> None:
        """Drain a listener; when this returns, nothing of it is in flight."""
        self.reason = "shutting down"
        logger.info(
            "draining",
            extra={"grace_s": self._grace_s, "drain_s": self._config.drain_s},
        )
        listener.leave()
        if self._config.shared:
            listener.take_queued()
            listener.close()
        await self._pause(self._grace_s)
        listener.take_queued()
        listener.close()
        num_left = await self._until_idle(listener, self._config.drain_s)
        if num_left:
            logger.warning("answers cut off: the router stops", extra={"number": num_left})
            self._is_cut = True
            for deadline in list(self._deadlines):
                if not deadline.expired():
                    deadline.reschedule(0.0)
            self._now.clear()
            await self._until_idle(listener, _LAST_WORDS_S)

    async def _until_idle(self, listener: Listener, longest_s: float) -> int:
        """Wait until no request is in flight; return how many are when the time is over."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while (num_busy := listener.close_idle()) and loop.time() < end_s:
            if self._now.is_set():
                break
            await self._pause(_LEAVING_LOOK_S)
        return num_busy

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._now.wait()
