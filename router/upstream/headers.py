"""Headers that go from one end to the other, past this proxy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from multidict import CIMultiDict

# Source: RFC 9110 section 7.6.1, and what RFC 2616 named; lower case.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

Headers = Iterable[tuple[str, str]]


def end_to_end(
    headers: Headers, *, drop: frozenset[str] = frozenset(), drop_prefix: str
) -> CIMultiDict[str]:
    """Copy headers without the hop-by-hop ones, those `Connection` names, and what to drop."""
    kept: CIMultiDict[str] = CIMultiDict()
    named: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            named.update(part.strip().lower() for part in value.split(","))
        if lower not in HOP_BY_HOP and lower not in drop and not lower.startswith(drop_prefix):
            kept.add(name, value)
    for name in named:
        kept.popall(name, None)
    return kept
