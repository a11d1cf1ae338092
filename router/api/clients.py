"""The client of a request: its address, as far as proxies in front are trusted; what it may see.

A connection's own address cannot be made up; an X-Forwarded-For can. It counts only where the
connection is a trusted proxy's (`forward.trusted_proxies`), and is read from its end: the client is
the last address in it that is no trusted proxy's. Where another one sends it, an
unknown proxy stands in between, and the client cannot be known.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from msgspec import Struct
from multidict import CIMultiDict, CIMultiDictProxy

_LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
_MOST_HOPS: Final = 32
_SAYS_FOR: Final = ("X-Forwarded-For", "Forwarded", "X-Real-IP")

FORWARDED: Final = frozenset(
    {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "x-real-ip"}
)
"""What a client may claim about itself; an engine reads what `Client.write` puts there."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Client(Struct, frozen=True):
    """A client. `sees_details`: it may see what the router knows, for instance of caches."""

    address: str
    sees_details: bool
    hops: str  # X-Forwarded-For, for the engine: the client first
    proto: str
    host: str | None

    def write(self, headers: CIMultiDict[str]) -> None:
        """Add what proxies tell an engine about a client."""
        headers["X-Forwarded-For"] = self.hops
        headers["X-Forwarded-Proto"] = self.proto
        if self.host is not None:
            headers["X-Forwarded-Host"] = self.host


class Clients:
    """Finds the clients of requests.

    Args:
        details: `auto` (clients at this machine's loopback or in `trusted`), `always` or `never`.
        trusted: Networks whose clients see as much as those on loopback.
        proxies: Networks of trusted proxies in front.
    """

    def __init__(
        self, *, details: str = "auto", trusted: Iterable[str] = (), proxies: Iterable[str] = ()
    ) -> None:
        self._details = details
        self._trusted = [network(text) for text in (*_LOOPBACK, *trusted)]
        self._proxies = [network(text) for text in proxies]
        self._kind = lru_cache(maxsize=4096)(self._kind_of)

    def find(self, peer: str | None, headers: CIMultiDictProxy[str], scheme: str) -> Client:
        """Find a request's client: `peer` is the connection's address, None: a local socket."""
        address = peer or "unix"
        is_proxy, is_trusted = self._kind(address)
        hops, proto, host = address, scheme, headers.get("Host")
        if is_proxy:
            given = ",".join(headers.getall("X-Forwarded-For", ()))
            if given:
                address = self._client_of(address, given)
                hops = f"{given}, {hops}"
            is_trusted = bool(given) and self._kind(address)[1]
            forwarded = headers.get("X-Forwarded-Proto", "").lower()
            proto = forwarded if forwarded in ("http", "https") else scheme
            host = headers.get("X-Forwarded-Host", host)
        elif is_trusted:
            is_trusted = not [name for name in _SAYS_FOR if name in headers]
        sees_details = self._details == "always" or (self._details == "auto" and is_trusted)
        return Client(address, sees_details, hops, proto, host)

    def _client_of(self, peer: str, given: str) -> str:
        """Read a list of hops from its end, as far as it is trusted."""
        client = peer
        for part in reversed(given.split(",")[-_MOST_HOPS:]):
            address = _address(part.strip())
            if address is None:
                break
            client = address
            if not self._kind(client)[0]:
                break
        return client

    def _kind_of(self, address: str) -> tuple[bool, bool]:
        """Return whether an address is a trusted proxy's, and whether it is a trusted client's."""
        if address == "unix":
            return False, True
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False, False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return (
            any(parsed in network for network in self._proxies),
            any(parsed in network for network in self._trusted),
        )


def network(text: str) -> _Network:
    """Read an address or a network in CIDR notation.

    Raises:
        ValueError: it is neither.
    """
    return ipaddress.ip_network(text, strict=False)


def _address(text: str) -> str | None:
    """Read one hop: an address, perhaps with a port; None: it is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
