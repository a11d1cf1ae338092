"""One client's request: whether it may use the port, its body, and the answer to it so far.

Errors and metrics are answered in the same shape at both ports.

A body is bounded as it comes in, alone and with all others. Only bytes that arrived count: a
client that announces much and sends little takes up little.

The HTTP parser refuses two lengths, a length beside a transfer coding, and codings that do not end
in `chunked`. A framing that another server could read differently is refused here (RFC 9112
section 6).

`Access` knows routes, clients, callers, and web pages (CORS). Web pages are allowed as vLLM allows
them by default. Preflights are answered here, before any key or replica is asked for: browsers send
them without the page's key. Answers of engines keep the engine's headers. A proxy in front may
allow less. The admin port has none. Source: Starlette 1.10 middleware/cors.py with vLLM 0.32's
defaults: every origin, method and header, and no credentials (cookies).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from aiohttp import HttpVersion11, web
from msgspec import Struct
from multidict import CIMultiDict

from router.api.answers import engine_error_event, error_body, error_event, error_headers
from router.api.body import SMALL_FORM_BYTES, AsSent, Withheld, is_encoded, utf8
from router.api.routes import Route, Routes, path_of
from router.api.sessions import Client, Clients
from router.base.caller import ANYBODY, Caller
from router.base.errors import (
    BadRequest,
    Overloaded,
    PayloadTooLarge,
    RouterError,
    ShuttingDown,
    UnsupportedEncoding,
    UpstreamBroken,
)
from router.config import LimitsConfig
from router.metrics import Metrics
from router.tenants import Tenants

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


ALLOW: Final = "Access-Control-Allow-Origin"
_METHODS: Final = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
_MAX_AGE_S: Final = "600"
_EXPOSED: Final = (
    "Retry-After, X-Request-Id, x-warmroute-request-id, x-warmroute-replica, x-warmroute-policy, "
    "x-warmroute-variant, x-warmroute-prefill, x-warmroute-cached, x-warmroute-ms, "
    "x-warmroute-waited-ms, x-warmroute-waited-for, x-warmroute-waits"
)
_ASKED: Final = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


def preflight(request: web.BaseRequest) -> web.Response | None:
    """Answer the question whether a page may send a request; None: it is another question."""
    asked = request.headers
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in asked:
        return None
    if "Origin" not in asked:
        return None
    headers = {
        **page_headers(asked),
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Max-Age": _MAX_AGE_S,
        "Vary": _ASKED,
    }
    if wanted := asked.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(text="OK", headers=headers)


def page_headers(asked: Mapping[str, str]) -> dict[str, str]:
    """Return what the router's own answer to a request says about web pages.

    Args:
        asked: The headers of the request.
    """
    if "Origin" not in asked:
        return {}
    return {ALLOW: "*", "Access-Control-Expose-Headers": _EXPOSED}


class Access(Struct, frozen=True, kw_only=True):
    """What the public port asks about a request before it is served."""

    routes: Routes
    clients: Clients
    tenants: Tenants | None  # None: clients are not told apart

    def client(self, request: web.BaseRequest) -> Client:
        """Find the client of a request."""
        return self.clients.find(request.remote, request.headers, request.scheme)

    def caller(self, request: web.BaseRequest) -> Caller:
        """Find who sends a request, by its key.

        Raises:
            Unauthorized: its key is missing or unknown.
        """
        return self.tenants.authenticate(request.headers) if self.tenants is not None else ANYBODY

    def route(self, request: web.BaseRequest) -> Route:
        """Find the route of a request.

        Raises:
            UnknownRoute, MethodNotAllowed: it is not served.
        """
        return self.routes.find(request.method, path_of(request.raw_path))


_LAST_WORD_S: Final = 0.5
_COMMENT: Final = b": no token yet\n\n"
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'  # of Messages: its clients expect it
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_AT_ONCE_BYTES: Final = 32 * 1024  # for which an empty write buffer has room
_BEHIND_BYTES: Final = 64 * 1024  # waiting for a client: as much as a transport takes by default
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_IDS_AT_ONCE: Final = 256


def request_ids() -> Iterator[str]:
    """Yield ids that no other router has, 128 random bits each; one system call makes many."""
    while True:
        digits = os.urandom(16 * _IDS_AT_ONCE).hex()
        yield from (digits[start : start + 32] for start in range(0, len(digits), 32))


class Exchange:
    """A request with its id and sender; the story writes the answer to it.

    Args:
        ids: Where its id is from, if the client has given it none.
    """

    __slots__ = (
        "_is_chunked",
        "_is_early",
        "_last",
        "_transport",
        "_written_s",
        "arrived_s",
        "caller",
        "client",
        "request",
        "request_id",
        "response",
    )

    def __init__(self, request: web.BaseRequest, client: Client, ids: Iterator[str]) -> None:
        given = request.headers.get("X-Request-Id", "")
        self.arrived_s = time.monotonic()
        self.request = request
        self.request_id = given if _REQUEST_ID.fullmatch(given) else next(ids)
        self.client = client
        self.caller = ANYBODY  # until its key is looked up
        self.response: web.StreamResponse | None = None
        self._is_chunked = False
        self._is_early = False
        self._last = b""  # the last piece of an answer
        self._written_s = self.arrived_s  # when it was written
        self._transport: asyncio.Transport | None = None  # of an answer that has begun

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers of every answer that no engine gave."""
        return {
            "x-warmroute-request-id": self.request_id,
            **page_headers(self.request.headers),
        }

    async def send(
        self, status: int, headers: CIMultiDict[str], body: bytes, *, is_own: bool = False
    ) -> None:
        """Send a whole answer; `is_own`: the router's own.

        A small answer is sent at once, because recording the request, which comes next, would delay
        it by 0.1 to 0.3 ms. A large one is sent when the handler returns it.
        """
        if self._is_early:
            if is_encoded(headers):
                raise UpstreamBroken("", "the answer is compressed, which was not asked for")
            self._is_early = False
            if status != 200:
                body = engine_error_event(body, self.request.path)
            self.put(body)
            return
        if is_own:
            headers.update(self.own_headers)
        self.response = response = web.Response(status=status, headers=headers, body=body)
        if len(body) <= _AT_ONCE_BYTES:
            with suppress(ConnectionError):  # aiohttp detects that, too
                await response.prepare(self.request)
                await response.write_eof()

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length.

        Raises:
            UpstreamBroken: its client takes a stream for begun, and it is an error.
        """
        if self._is_early:
            if is_encoded(headers):
                replica = headers.get("x-warmroute-replica", "")
                raise UpstreamBroken(replica, "the answer is compressed, which was not asked for")
            if status != 200:
                replica = headers.get("x-warmroute-replica", "")
                raise UpstreamBroken(replica, f"replica {replica} answered with status {status}")
            self._is_early = False
            return
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self.request)
        self._is_chunked = "Transfer-Encoding" in self.response.headers
        self._transport = self.request.transport

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once."""
        assert self.response is not None
        if chunk:
            self._last, self._written_s = chunk, time.monotonic()
            await self.response.write(chunk)

    def put(self, chunk: bytes, framed: bytes | None = None) -> bool:
        """Send the next piece, at once; False: the client is behind, see `catch_up`.

        As aiohttp would write it, without its three coroutines.

        Args:
            chunk: The piece.
            framed: The same in whole chunks. None: it is still to be framed.

        Raises:
            ConnectionError: the client has left.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        self._last, self._written_s = chunk, time.monotonic()
        if not self._is_chunked:
            transport.write(chunk)
        else:
            transport.write(framed or b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return transport.get_write_buffer_size() <= _BEHIND_BYTES

    async def catch_up(self) -> None:
        """Wait until a client that was behind has taken most of what waits for it."""
        await self.request.writer.drain()

    async def keep_alive(self, every_s: float, headers: Callable[[], Mapping[str, str]]) -> None:
        """Write a keep-alive to a stream's client after each silence of `every_s`; runs on.

        With one before the first token the answer begins: what goes wrong from there on comes as
        an event. Inside an answer they stand between events.
        """
        keep_alive = _PING if self.request.path.startswith("/v1/messages") else _COMMENT
        self._written_s = time.monotonic()
        with suppress(ConnectionError):  # the writer of the answer detects it
            while True:
                left_s = self._written_s + every_s - time.monotonic()
                if left_s > 0.0:
                    await asyncio.sleep(left_s)
                    continue
                if self.response is None:
                    begun = {
                        "Content-Type": "text/event-stream; charset=utf-8",
                        "Cache-Control": "no-cache",
                        **self.own_headers,
                        **headers(),
                    }
                    await self.start(200, CIMultiDict(begun))
                    self._is_early = True
                if self._is_early or self._is_between_events():
                    self.put(keep_alive)
                else:
                    await asyncio.sleep(every_s)

    def _is_between_events(self) -> bool:
        """Return whether a keep-alive may be written into a stream now."""
        is_plain = self.response is not None and "Content-Encoding" not in self.response.headers
        return is_plain and self.is_stream and self._last.endswith(_EVENT_ENDS)

    @property
    def is_early(self) -> bool:
        """Whether a stream has begun and its client has read nothing but keep-alives."""
        return self._is_early

    @property
    def is_stream(self) -> bool:
        """Whether the answer has begun and takes events."""
        return (
            self.response is not None
            and self.response.content_type == "text/event-stream"
            and not is_encoded(self.response.headers)
        )

    async def cut(self, error: ShuttingDown) -> None:
        """Write to a stream's client that the rest will not come, if it takes that at once."""
        if self.is_stream:
            self._is_early = False
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self.write(error_event(error, self.request.path))

    def abort(self) -> web.StreamResponse:
        """Close a connection whose answer cannot be finished: its length would be a lie."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return self.response or web.Response(status=499)


class Intake:
    """The budget for the bodies of all requests in flight."""

    __slots__ = ("_limits", "_withheld", "held_bytes")

    def __init__(self, limits: LimitsConfig, withheld: Withheld, metrics: Metrics) -> None:
        self._limits = limits
        self._withheld = withheld
        self.held_bytes = 0
        metrics.body_bytes.set_function(lambda: self.held_bytes)

    def hold(self) -> HeldBody:
        """Hold one request's body; it counts until the context ends."""
        return HeldBody(self, self._limits, self._withheld)


class HeldBody:
    """One request's part of the budget; a context, at whose end the body is no longer held."""

    __slots__ = ("_intake", "_limits", "_num_bytes", "_withheld")

    def __init__(self, intake: Intake, limits: LimitsConfig, withheld: Withheld) -> None:
        self._intake = intake
        self._limits = limits
        self._withheld = withheld
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._add(-self._num_bytes)

    async def receive(
        self, request: web.BaseRequest, route: Route, caller: Caller
    ) -> tuple[bytes | None, AsSent | None]:
        """Read the body, and decode it if the router has to look into it.

        Returns:
            The body; None: there is none. What the client sent, if the body was encoded.

        Raises:
            ClientError, Overloaded: it cannot be read, or is not wanted.
        """
        body = await self._read(request, caller.body_bytes)
        if not body or route.takes == "any":
            return body, None
        view = await self._readable(request, route, body)
        if view is body:
            return body, None
        self.count(len(view))
        return view, AsSent(body, view)

    async def _readable(self, request: web.BaseRequest, route: Route, body: bytes) -> bytes:
        """Decode a body; `body` itself, if it is plain. A form is checked.

        Raises:
            ClientError: it is not what it says, or has what clients must not send.
        """
        if is_encoded(request.headers):
            raise UnsupportedEncoding(
                "compressed bodies are not read here, nor by vLLM; send the body without "
                "Content-Encoding",
                param="Content-Encoding",
            )
        if route.takes == "json":
            return utf8(body)
        kind = request.headers.get("Content-Type", "")
        if len(body) <= SMALL_FORM_BYTES:
            self._withheld.check_form(body, kind)
        else:
            await asyncio.to_thread(self._withheld.check_form, body, kind)
        return body

    async def _read(self, request: web.BaseRequest, own_limit: int | None) -> bytes | None:
        """Read the body once, bounded in size and time; None: there is none.

        `own_limit` is the caller's, in bytes; None: it has none of its own.

        Raises:
            PayloadTooLarge, BadRequest: larger than allowed; not sent in time, or broken.
            Overloaded: the budget is used up; before a byte is read, if the length was announced.
        """
        if not request.body_exists:
            return None
        _check_framing(request)
        self._check(request.content_length or 0, own_limit)
        await _let_send(request)
        content = request.content
        parts: list[bytes] = []
        try:
            if content.is_eof():  # as mostly: it came with its head, and no one waits
                return self._held(content.read_nowait(), own_limit)
            async with asyncio.timeout(self._limits.receive_timeout_s):
                while part := await content.readany():
                    parts.append(self._held(part, own_limit))
        except web.RequestPayloadError as exc:
            raise BadRequest("the body is incomplete or framed wrongly") from exc
        except TimeoutError as exc:
            raise BadRequest(
                f"the body did not arrive within {self._limits.receive_timeout_s:g} s"
            ) from exc
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _held(self, part: bytes, own_limit: int | None) -> bytes:
        """Count a part that has arrived among what is held."""
        self._check(self._num_bytes + len(part), own_limit)
        self._add(len(part))
        return part

    def count(self, num_bytes: int) -> None:
        """Count what was decoded of the body and is held, too.

        Raises:
            Overloaded: the budget is used up.
        """
        self._check_budget(self._num_bytes + num_bytes)
        self._add(num_bytes)

    def _check(self, num_bytes: int, own_limit: int | None) -> None:
        """Refuse a body of this size, arrived or announced."""
        limit, which = self._limits.body_bytes, "limits.body_bytes"
        if own_limit is not None and own_limit < limit:
            limit, which = own_limit, "tenant limit"
        if num_bytes > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes ({which})")
        self._check_budget(num_bytes)

    def _check_budget(self, num_bytes: int) -> None:
        budget = self._limits.inflight_bytes
        if self._intake.held_bytes - self._num_bytes + num_bytes > budget:
            raise Overloaded(
                f"requests in flight take {budget} bytes (limits.inflight_bytes); try again"
            )

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._intake.held_bytes += num_bytes


def _check_framing(request: web.BaseRequest) -> None:
    """Refuse a transfer coding other than `chunked` alone, or in HTTP/1.0.

    Raises:
        BadRequest: the router does not decode it, and an engine must not be left to guess.
    """
    coding = request.headers.get("Transfer-Encoding")
    if coding is None:
        return
    if coding.strip().lower() != "chunked":
        why = "Transfer-Encoding must be chunked"
    elif request.version < HttpVersion11:
        why = "HTTP/1.0 has no Transfer-Encoding"
    else:
        return
    request.protocol.close()  # after the answer: where this request ended is a matter of opinion
    raise BadRequest(why, param="Transfer-Encoding")


async def _let_send(request: web.BaseRequest) -> None:
    """Ask a client that waits before its body to send it (`Expect: 100-continue`)."""
    if "Expect" in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
