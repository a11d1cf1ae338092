"""What a folder of observers adds to a router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from router.config import Config
from router.http.admin import AdminPages
from router.http.exchange import Access
from router.http.pages import OwnRoutes, Pages
from router.http.server import Handler
from router.request.observer import Observer
from router.request.prompt import Choose


class ObserverPart(Struct, frozen=True, kw_only=True):
    """One folder's part of a router; each field may be left out.

    observers: In the order in which they are called.
    choose: Says how a prompt is placed; of one part at most.
    pages: Routes of the admin port.
    open_paths: Of these routes, those without data; they need no token.
    own_routes: Routes of the public port.
    wrap_answer: Wraps what answers the public port.
    configure: Called with a configuration that was read again.
    sections: Of the state that the live page shows.
    loops: What runs beside requests, by name; it is started again if it fails.
    start: Called before the first request.
    sweep: Called ten times a second, with monotonic seconds.
    """

    observers: Sequence[Observer] = ()
    choose: Choose | None = None
    pages: Sequence[AdminPages] = ()
    open_paths: Sequence[str] = ()
    own_routes: OwnRoutes = {}
    wrap_answer: Callable[[Handler, Pages, Access], Handler] | None = None
    configure: Callable[[Config], None] | None = None
    sections: Mapping[str, Callable[[], Any]] = {}
    loops: Mapping[str, Callable[[], Awaitable[None]]] = {}
    start: Callable[[], None] | None = None
    sweep: Callable[[float], None] | None = None
