"""A replica's answer while it is read, with a deadline between bytes.

Bytes of a body are received as soon as they come: no task has to wake up for them. A stream's
events come one by one. Waking a task for each, through a dozen awaits, was most of the cost of
passing an event on. Parsing each was half of the rest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, cast

import aiohttp

from router.api.body import is_encoded
from router.replicas.health import Signs
from router.upstream.session import Response, upstream_error

_SIZES: Final = {b"%x" % size: size for size in range(1, 2048)}
"""Looked up in half the time that it takes to parse a number and to see that it is a plain one."""

_LONGEST_LINE: Final = 5  # three digits and the line's end
_EVENT_END: Final = b"\n\n"
_EVENT_AND_CHUNK_END: Final = b"\n\n\r\n"


def is_between_chunks(piece: bytes, body: bytes) -> bool:
    """Return whether a parser stands between two chunks, after an event.

    Args:
        piece: What it was fed last.
        body: The last of what it made of that; all that it made of it has been taken.

    Inside a chunk it would have handed over the line's end, too; behind a chunk's size the line
    before would not be empty.
    """
    return piece.endswith(_EVENT_AND_CHUNK_END) and body.endswith(_EVENT_END)


def body_of_chunks(piece: bytes) -> bytes | None:
    """Return the body of whole chunks; None: something else is there, the last chunk included.

    Args:
        piece: It begins where a chunk does.
    """
    line_end = piece.find(b"\r\n", 0, _LONGEST_LINE)
    size = _SIZES.get(piece[:line_end])
    if size is not None and line_end + size + 4 == len(piece) and piece.endswith(b"\r\n"):
        return piece[line_end + 2 : -2]  # one chunk, as mostly
    bodies = []
    start, end = 0, len(piece)
    while start < end:
        line_end = piece.find(b"\r\n", start, start + _LONGEST_LINE)
        size = _SIZES.get(piece[start:line_end])
        if size is None:
            return None
        body_start = line_end + 2
        body_end = body_start + size
        start = body_end + 2
        if piece[body_end:start] != b"\r\n":
            return None
        bodies.append(piece[body_start:body_end])
    return b"".join(bodies)


@contextmanager
def tapped(response: Response, taker: _Pouring) -> Iterator[None]:
    """Pass a response's body on as it comes, until its taker wants no more."""
    transport = response.connection.transport
    if transport is None:  # it broke off
        yield
        return
    tap = _Tap(transport, taker)
    try:
        yield
    finally:
        tap.remove()


class _Tap(asyncio.Protocol):
    """Stands in front of a connection's protocol while one body is read.

    It goes with the body's last byte: the connection may have another request in the same turn.
    """

    def __init__(self, transport: asyncio.Transport, taker: _Pouring) -> None:
        self._transport = transport
        self._reader = cast(asyncio.Protocol, transport.get_protocol())
        self._taker = taker
        self._is_between = False  # the parser stands between two chunks, as far as is known
        transport.set_protocol(self)

    def remove(self) -> None:
        """Leave the connection to its own protocol; a second time does nothing."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._reader)

    def data_received(self, data: bytes) -> None:
        taker = self._taker
        body = body_of_chunks(data) if self._is_between else None
        if body is not None:
            goes_on = taker.pass_on(body, data)
        else:
            self._reader.data_received(data)
            self._is_between = is_between_chunks(data, taker.look())
            goes_on = not taker.is_over
        if not goes_on:
            self.remove()

    def eof_received(self) -> bool | None:
        keep_open = self._reader.eof_received()
        self._taker.look()
        if self._taker.is_over:
            self.remove()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)
        self._taker.look()

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()


_MOST_HELD_BYTES: Final = 16 * 1024  # of keep-alives in front of a stream

Take = Callable[[bytes, bytes | None], bool]
"""Takes a piece of a body; the second argument is the piece in whole chunks, if it came so."""


class Answer:
    """A replica's answer, its first bytes read. Close it in a `finally`.

    A stream is silent while nothing but keep-alive comments comes.

    streams: Whether its body is server-sent events, readable or not.
    is_encoded: Its body is compressed, although that was not asked for: passed on as it comes.
    is_event_stream: Whether its body is server-sent events that can be read.
    """

    __slots__ = (
        "_idle_s",
        "_idle_timer",
        "_is_doubted",
        "_is_kept_alive",
        "_keep_alives",
        "_loop",
        "_on_close",
        "_pouring",
        "_replica",
        "_response",
        "_signs",
        "_waits_since_s",
        "error_status",
        "fault",
        "first",
        "first_s",
        "headers",
        "is_encoded",
        "is_event_stream",
        "status",
        "streams",
    )

    def __init__(
        self,
        replica: str,
        response: Response,
        first: bytes,
        idle_s: float,
        signs: Signs,
        on_close: Callable[[], None],
    ) -> None:
        self._on_close: Callable[[], None] | None = on_close
        self._replica = replica
        self._response = response
        self._idle_s = idle_s
        self._signs = signs
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None  # None: no one waits for the next bytes
        self._pouring: _Pouring | None = None  # takes what has come; None: a task does
        self.first = first
        self.first_s: float | None = None  # of the first token or byte, by the caller's clock
        self.error_status: int | None = None  # of a stream whose first event is an error
        self.fault: str | None = None  # why it is no answer though its status is 200
        kind = response.headers.get("Content-Type", "").partition(";")[0]
        self.is_encoded = is_encoded(response.headers)
        self.streams = kind.strip().lower() == "text/event-stream"
        self.is_event_stream = self.streams and not self.is_encoded
        self.status, self.headers = response.status, response.headers
        self._is_doubted = False  # whether its replica's figures were asked for
        self._is_kept_alive = False  # whether the last bytes were keep-alives
        self._keep_alives = KeepAlives() if self.is_event_stream else None

    @property
    def outcome_status(self) -> int:
        """The status of the outcome: a stream's own error, 503 if it is no answer, else HTTP's."""
        return self.error_status or (self.status if self.fault is None else 503)

    @property
    def readable(self) -> bytes:
        """`first`; nothing, if it is compressed."""
        return b"" if self.is_encoded else self.first

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        return self._response.content.at_eof()

    async def begin(self) -> None:
        """Read on until more than keep-alives has come; `first` begins with those.

        Of a stream's many keep-alives the oldest are dropped.

        Raises:
            aiohttp.ClientError, OSError: the answer broke off.
        """
        content, keep_alives, piece = self._response.content, self._keep_alives, self.first
        while not self._note(piece) and not self.complete:
            if keep_alives is not None and len(self.first) > _MOST_HELD_BYTES:
                self.first = keep_alives.unfinished
            piece = await content.readany()
            self.first += piece

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

    async def read_on(self, wait_s: float | None) -> bool:
        """Read the next piece into `first`; False, and nothing lost, if none comes in time.

        Args:
            wait_s: None: as long as it takes; the caller has a deadline.

        Raises:
            UpstreamBroken, UpstreamTimeout: the answer broke off.
        """
        if wait_s is not None and wait_s <= 0.0:
            return False
        deadline = asyncio.timeout(wait_s)
        try:
            async with deadline:
                piece = await self._response.content.readany()
        except TimeoutError:
            if not deadline.expired():
                raise
            return False
        except (aiohttp.ClientError, OSError) as exc:
            raise upstream_error(exc, self._replica, "inside its answer") from exc
        self._note(piece)
        self.first += piece
        return True

    def may_hang(self, since_s: float) -> bool:
        """Return whether its replica was not seen at work since then, or only wrote keep-alives."""
        works = self._signs.works_since(since_s)
        if works is False and not self._is_doubted:
            self._is_doubted = True
            self._signs.on_doubt()
        return self._is_kept_alive if works is None else not works

    async def pour(self, take: Take) -> None:
        """Hand the body after `first` to `take` as it arrives, until that returns False.

        For streams: `take` is called as bytes come, not by this task.

        Raises:
            UpstreamBroken, UpstreamTimeout: after what was taken the answer broke off.
            Exception: what `take` raised.
        """
        pouring = self._pouring = _Pouring(self, take)
        try:
            pouring.look()
            if not pouring.is_over:
                self._watch()
                with tapped(self._response, pouring):
                    await pouring.over
        finally:
            self._pouring = self._waits_since_s = None
        if pouring.failure is not None:
            raise pouring.failure

    def _take(self, take: Take) -> tuple[bytes, bool]:
        """Hand over what is here; return the last piece, and whether more is wanted.

        Raises:
            UpstreamBroken, UpstreamTimeout: the answer broke off.
        """
        content = self._response.content
        last = b""
        while True:
            num_bytes = content.total_bytes
            try:
                chunk = content.read_nowait()
            except (TimeoutError, aiohttp.ClientError, OSError) as exc:
                raise upstream_error(exc, self._replica, "inside its answer") from exc
            if chunk:
                last = chunk
                self._note(chunk)
                if not take(chunk, None):
                    return last, False
            if content.total_bytes == num_bytes:  # else reading let more in
                return last, True

    async def _next(self) -> bytes:
        self._waits_since_s = self._loop.time()
        self._watch()
        try:
            piece = await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise upstream_error(exc, self._replica, "inside its answer") from exc
        finally:
            self._waits_since_s = None
        self._note(piece)
        return piece

    def _note(self, piece: bytes) -> bool:
        """Record that a piece has come; return whether it says more than that."""
        now_s, signs, keep_alives = self._loop.time(), self._signs, self._keep_alives
        if keep_alives.are_all(piece) if keep_alives is not None else not piece.strip():
            self._is_kept_alive = bool(piece)
            return False
        signs.said_s = now_s
        if self._waits_since_s is not None:
            self._waits_since_s = now_s
        return True

    def _watch(self) -> None:
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)

    def _check_idle(self) -> None:
        """Fail a read that has waited for too long, else check again when it would have.

        The replica may be at work meanwhile, and is waited for then.

        One timer for the whole answer: a deadline around each event's read was a fifth of what
        passing the event on costs.
        """
        now_s = self._loop.time()
        since_s = now_s if self._waits_since_s is None else self._waits_since_s
        left_s = self._signs.wait_s(since_s, self._idle_s, now_s)
        if left_s is not None:
            self._idle_timer = self._loop.call_later(left_s, self._check_idle)
        else:
            self._response.content.set_exception(TimeoutError())
            if self._pouring is not None:
                self._pouring.look()

    def close(self) -> None:
        """Release the connection, or cut it where the answer was not read to its end."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._response.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class _Pouring:
    """A body on its way to who takes it, as it comes.

    over: Done when no more is to come, or is wanted.
    failure: Why, where something was raised: for the task that waits, not for the connection.
    """

    __slots__ = ("_answer", "_take", "failure", "over")

    def __init__(self, answer: Answer, take: Take) -> None:
        self._answer = answer
        self._take = take
        self.failure: Exception | None = None
        self.over: asyncio.Future[None] = answer._loop.create_future()

    @property
    def is_over(self) -> bool:
        """Whether no more is to come, or is wanted; also when the task that waits has gone."""
        return self.over.done()

    def look(self) -> bytes:
        """Hand over what has been parsed; return the last piece of it."""
        last, goes_on = b"", False
        if not self.is_over:
            if self._answer._waits_since_s is None:
                self._answer._waits_since_s = self._answer._loop.time()
            try:
                last, goes_on = self._answer._take(self._take)
            except Exception as exc:
                self.failure = exc
            if not goes_on or self._answer.complete:
                self.over.set_result(None)
        return last

    def pass_on(self, body: bytes, chunks: bytes) -> bool:
        """Hand over what need not be parsed; False: no more is wanted."""
        over = self.over
        if over.done():
            return False
        self._answer._note(body)
        try:
            goes_on = self._take(body, chunks)
        except Exception as exc:
            self.failure, goes_on = exc, False
        if not goes_on:
            over.set_result(None)
        return goes_on


MAX_BYTES: Final = 64 * 1024
"""The most bytes of a line without an end; a longer one counts as an event."""

_LINES: Final = re.compile(
    rb'(?:(?:(?:id|retry)?:[^\r\n]*|data:?[ \t]*|event: ?ping|data: ?\{"type": ?"ping"\}|)'
    rb"(?:\r\n|\r|\n))*"
)
_FORMS: Final = (
    b"id:",
    b"retry:",
    b"data:  ",
    b"event: ping",
    b"event:ping",
    b'data: {"type": "ping"}',
    b'data: {"type":"ping"}',
    b'data:{"type": "ping"}',
    b'data:{"type":"ping"}',
)
_SAID: Final = b"data: -"  # stands for the beginning of an event's line
_OUTPUT: Final = (b'data: {"id"', b"event: content", b"event: response")
"""How most events begin; no keep-alive does."""


class KeepAlives:
    """Tells keep-alives from an engine's output, in a stream that comes in pieces.

    Keep-alives are comments, empty lines, pings, and an id or `retry` alone. Source: vLLM 0.32
    entrypoints/serve/utils/sse_keep_alive.py (`--sse-keep-alive-interval`, for chat and
    completions); Anthropic's `ping` events; WHATWG HTML section 9.2 (comments, empty data).

    unfinished: The beginning of a line that is a keep-alive so far.
    """

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = b""  # of the line that the next piece goes on with

    @property
    def unfinished(self) -> bytes:
        return b"" if self._begun is _SAID else self._begun

    def are_all(self, piece: bytes) -> bool:
        """Return whether a piece has keep-alives alone, as far as it shows."""
        begun = self._begun
        if not begun and piece.startswith(_OUTPUT) and piece.endswith(b"\n"):
            return False
        text = begun + piece if begun else piece
        match = _LINES.match(text)
        assert match is not None  # it matches nothing, too
        rest = text[match.end() :]
        if not rest or (_may_become_one(rest) and len(rest) <= MAX_BYTES):
            self._begun = rest
            return True
        self._begun = b"" if piece.endswith((b"\n", b"\r")) else _SAID
        return False


def _may_become_one(line: bytes) -> bool:
    """Return whether a line that has not ended is a keep-alive so far."""
    if b"\n" in line or b"\r" in line:
        return False
    is_one = line.startswith((b":", b"id:", b"retry:"))
    return is_one or any(form.startswith(line) for form in _FORMS)
