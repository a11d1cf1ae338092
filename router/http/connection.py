"""One client's connection: aiohttp's HTTP/1.1 protocol, with our errors and a view for the server.

Requests go to the application. Bytes that are not HTTP are answered here, in the API's error shape,
and never quoted: neither to the client nor in the log.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from router.api.answers import error_body, error_headers
from router.base.errors import BadRequest, HeadersTooLarge, RouterError
from router.metrics import Metrics

if TYPE_CHECKING:
    from router.http.server import Listener


METRICS_HEADERS: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class InternalError(RouterError):
    """Our own bug; the log has the traceback, the client a request id."""


def error_answer(
    error: RouterError, path: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Answer an error in the shape of the API behind `path`."""
    return web.Response(
        status=error.status,
        body=error_body(error, path),
        content_type="application/json",
        headers={**(headers or {}), **error_headers(error)},
    )


async def metrics_answer(metrics: Metrics) -> web.Response:
    """Answer all metrics in Prometheus' text format."""
    return web.Response(body=await metrics.render_in_turns(), headers=METRICS_HEADERS)


def without_message(
    error: BaseException,
) -> tuple[type[InternalError], InternalError, TracebackType | None]:
    """Return where an error happened, for a log: its message may quote the request."""
    return (InternalError, InternalError(type(error).__name__), error.__traceback__)


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


def _refusal(exc: BaseException | None, header_bytes: int) -> RouterError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge(f"the request line or a header is longer than {header_bytes} bytes")
    if isinstance(exc, BadHttpMessage) and exc.message.startswith("Too many headers"):
        return HeadersTooLarge("the request has too many headers")
    if isinstance(exc, BadHttpMessage):
        if twice := re.match(r"Duplicate '([\w-]+)' header", exc.message):
            return BadRequest(f"the request has two {twice[1]} headers")
    return BadRequest("the request is not HTTP/1.1")
