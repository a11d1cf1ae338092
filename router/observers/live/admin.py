"""The live feed and the live page of the admin port.

The feed has finished requests and the router's state, as NDJSON.

The page, at the root, is one file with its script and its style. It has no data, so it is served
without a token. Its script asks for the token and sends it with each request for data. The browser
runs nothing but that script: it is named by its hash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web

from router.base.bounded import Backlog
from router.http.admin import Handler, number_in
from router.observers.live.recent import NUM_LAST, Feed, decision_line
from router.observers.live.state import LiveState
from router.records.record import DecisionRecord

_TICK_S: Final = 0.1
_STATE_S: Final = 1.0
_MAX_PER_S: Final = 500
_PER_S: Final = 100
_MAX_WAITING: Final = 100  # records; of 1,000 replicas, one has 200 kB
_NOT_STORED: Final = {"Cache-Control": "no-store"}
_LIVE_HEADERS: Final = {
    "Content-Type": "application/x-ndjson",
    **_NOT_STORED,
    "X-Accel-Buffering": "no",
}


class LivePages:
    """The feed, and one state of it for those who poll.

    Args:
        feed: Finished requests.
        state: Describes the router.
    """

    def __init__(self, feed: Feed, state: LiveState) -> None:
        self._feed = feed
        self._state = state

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/live": self._live, "GET /admin/state": self._one_state}

    async def _one_state(self, _: web.Request) -> web.Response:
        return web.Response(
            body=await self._state.line(time.monotonic()),
            content_type="application/json",
            headers=_NOT_STORED,
        )

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Stream until the client leaves.

        `?per_s=` bounds the requests of a second; `?last=` of those that ended before come first.
        """
        query = request.query
        per_s = number_in(query, "per_s", _PER_S, most=_MAX_PER_S)
        num_last = number_in(query, "last", 0, most=NUM_LAST) if "last" in query else 0
        with self._feed.subscribe(min(per_s, _MAX_WAITING), num_last) as listener:
            response = web.StreamResponse(headers=_LIVE_HEADERS)
            await response.prepare(request)
            ticks = _Ticks(self._state, listener, per_s)
            while True:
                lines = await ticks.lines(time.monotonic())
                if lines:
                    await response.write(b"\n".join([*lines, b""]))
                await asyncio.sleep(_TICK_S)


class _Ticks:
    """What one listener is sent at each tick."""

    def __init__(self, state: LiveState, listener: Backlog[DecisionRecord], per_s: int) -> None:
        self._state = state
        self._listener = listener
        self._per_tick = max(1, round(per_s * _TICK_S))
        self._state_due_s = 0.0
        self._num_lost = 0

    async def lines(self, now_s: float) -> list[bytes]:
        """Return the next lines; the state is first, since it has the names of sessions."""
        lines = []
        if now_s >= self._state_due_s:
            self._state_due_s = now_s + _STATE_S
            lines.append(await self._state.line(now_s))
        records = self._listener.take(self._per_tick)
        lines += [msgspec.json.encode(decision_line(record)) for record in records]
        if self._listener.num_dropped != self._num_lost:
            self._num_lost = self._listener.num_dropped
            lines.append(msgspec.json.encode({"kind": "lost", "decisions": self._num_lost}))
        return lines


PAGE: Final = "/"

_ELEMENT: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_NEEDS_TOKEN: Final = '<html lang="en" data-token="needed">'
_IS_OPEN: Final = '<html lang="en" data-token="none">'


class LivePage:
    """Serves the page; `needs_token` False: the port is open."""

    def __init__(self, *, needs_token: bool) -> None:
        page = files("router.observers.live").joinpath("page.html").read_text(encoding="utf-8")
        self._headers = headers_of(page)
        if not needs_token:
            page = page.replace(_NEEDS_TOKEN, _IS_OPEN, 1)
        self._page = page

    def routes(self) -> Mapping[str, Handler]:
        return {f"GET {PAGE}": self._answer}

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=self._headers)


def headers_of(page: str) -> dict[str, str]:
    """Return the headers that let a browser do what the page needs, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for element, text in _ELEMENT.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[element].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
