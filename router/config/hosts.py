"""Which hosts a replica that is added while the router runs may have.

An order of the admin API, or a record of another router in Redis, makes this router connect to an
address and send it prompts. So that address has to match `admin.replica_hosts`. What is named in
the configuration is the operator's own and is not checked here.

    pattern          matches
    loopback         127.0.0.0/8, ::1
    private          10/8, 172.16/12, 192.168/16, 100.64/10 (RFC 6598), fc00::/7
    10.1.0.0/16      addresses of that network; a single address, too
    *                any name without a dot: localhost, services of a compose network
    .svc.example     any name that ends so
    engine.example   that name

Link-local, multicast and unspecified addresses match nothing, whatever is configured: cloud
metadata services are link-local, and 0.0.0.0 is a way to write localhost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final
from urllib.parse import urlsplit

from router.base.addresses import address_of

_NETWORKS: Final = {
    "loopback": ("127.0.0.0/8", "::1/128"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
}
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_PATTERN: Final = re.compile(r"\*|\.?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


class HostRules:
    """The hosts that match one of some patterns.

    Raises:
        ValueError: one of `patterns` is wrong; the message names it and what one looks like.
    """

    __slots__ = ("_names", "_networks", "patterns")

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._names: list[str] = []
        self._networks = [
            ip_network(network)
            for pattern in self.patterns
            for network in _NETWORKS.get(pattern, ())
        ]
        for pattern in self.patterns:
            if pattern not in _NETWORKS:
                self._add(pattern)

    def _add(self, pattern: str) -> None:
        try:
            self._networks.append(ip_network(pattern))
        except ValueError as exc:
            is_number = re.fullmatch(r"[\d./]+|.*[:/].*", pattern) is not None
            if is_number or not _PATTERN.fullmatch(pattern):
                raise ValueError(
                    f"{pattern!r} is not loopback, private, a network (10.0.0.0/8), a name, "
                    ".SUFFIX or * (names without a dot)"
                ) from exc
            self._names.append(pattern.lower())

    def allows(self, host: str) -> bool:
        """Whether a host, as it stands in a URL (without brackets), may be connected to."""
        address = address_of(host)
        if address is not None:
            return _is_ordinary(address) and any(address in n for n in self._networks)
        name = host.lower().removesuffix(".")
        return _NAME.fullmatch(name) is not None and any(_matches(name, p) for p in self._names)

    def refused(self, urls: Sequence[str]) -> str | None:
        """Return the first host among `urls` that is not allowed; None: all are."""
        for url in urls:
            host = urlsplit(url).hostname
            if host is None or not self.allows(host):
                return host or url
        return None


def _is_ordinary(address: IPv4Address | IPv6Address) -> bool:
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


def _matches(name: str, pattern: str) -> bool:
    if pattern == "*":
        return "." not in name
    return name.endswith(pattern) if pattern.startswith(".") else name == pattern
