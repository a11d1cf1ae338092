"""Routes of the public port that the router answers itself, for a caller with its key.

What needs no key is in router.http.pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from router.base.caller import Caller


class Asked(Struct, frozen=True, kw_only=True):
    """A request for such a route; `body` None: it has none."""

    caller: Caller
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes | None


OwnRoutes = Mapping[str, Callable[[Asked], Awaitable[dict[str, Any]]]]
"""Path -> what answers its POSTs, with a JSON object; it may raise a RouterError."""
