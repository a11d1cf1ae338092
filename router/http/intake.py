"""Request bodies as they come in: bounded each, and all together.

Only bytes that arrived count: a client that announces much and sends little takes up little.

The HTTP parser refuses two lengths, a length beside a transfer coding, and codings that do not end
in `chunked`. A framing that another server could read differently is refused here (RFC 9112
section 6).
"""

from __future__ import annotations

import asyncio
from typing import Self

from aiohttp import HttpVersion11, web

from router.api.encodings import AsSent, is_encoded, utf8
from router.api.forms import SMALL_BYTES
from router.api.routes import Route
from router.api.withheld import Withheld
from router.base.caller import Caller
from router.base.errors import (
    BadRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedEncoding,
)
from router.config import LimitsConfig
from router.metrics import Metrics


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
        if len(body) <= SMALL_BYTES:
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
