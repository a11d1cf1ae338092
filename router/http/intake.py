"""Request bodies as they come in: bounded each, and all together.

What counts is what arrived: a client that announces much and sends little takes up little.
"""

from __future__ import annotations

import asyncio
from typing import Self

from aiohttp import web

from router.config import LimitsConfig
from router.errors import BadRequest, Overloaded, PayloadTooLarge
from router.http.framing import check_framing, let_send
from router.metrics import Metrics


class Intake:
    """The budget for the bodies of all requests in flight, and the messages of WebSockets."""

    __slots__ = ("_limits", "held_bytes")

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits = limits
        self.held_bytes = 0
        metrics.body_bytes.set_function(lambda: self.held_bytes)

    def hold(self) -> HeldBody:
        """Hold one request's body; it counts until the context ends."""
        return HeldBody(self, self._limits)


class HeldBody:
    """One request's part of the budget; a context, at whose end the body is no longer held."""

    __slots__ = ("_intake", "_limits", "_num_bytes")

    def __init__(self, intake: Intake, limits: LimitsConfig) -> None:
        self._intake = intake
        self._limits = limits
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._add(-self._num_bytes)

    async def read(self, request: web.BaseRequest, own_limit: int | None) -> bytes | None:
        """Read the body once, bounded in size and time; None: there is none.

        `own_limit` is the tenant's, in bytes; None: it has none of its own.

        Raises:
            PayloadTooLarge, BadRequest: larger than allowed; not sent in time, or broken.
            Overloaded: the budget is used up; before a byte is read, if the length was announced.
        """
        if not request.body_exists:
            return None
        check_framing(request)
        self._check(request.content_length or 0, own_limit)
        await let_send(request)
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

    def release(self, num_bytes: int) -> None:
        """Count no longer what is not held any more, before the context ends."""
        self._add(-num_bytes)

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
