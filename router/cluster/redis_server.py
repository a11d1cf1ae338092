"""A Redis server: its address, and what it says of itself."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from router.base.errors import StoreRefused, StoreUnavailable
from router.cluster.redis_errors import CLUSTER, HINTS

OLDEST_VERSION: Final = (6, 2)


class Address(NamedTuple):
    host: str  # or the path of a socket
    port: int  # 0: a socket

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


class Server(Struct, frozen=True, kw_only=True):
    """The server that has the data, as it introduced itself."""

    address: str
    name: str  # redis, valkey
    version: str


def parse_url(text: str | None) -> tuple[str, Address, int]:
    """Read a URL that router.config has checked: scheme, address, database."""
    url = urlsplit(text or "redis:")
    if url.scheme == "unix":
        db = int(parse_qs(url.query).get("db", ["0"])[0])
        return url.scheme, Address(unquote(url.path), 0), db
    return (
        url.scheme,
        Address(url.hostname or "", url.port or 6379),
        int(url.path.strip("/") or 0),
    )


def as_map(flat: Any) -> dict[str, Any]:
    """Read a map as RESP 2 has it: names and values by turns; empty if it is none."""
    if not isinstance(flat, list):
        return {}
    words = [word.decode() if isinstance(word, bytes) else word for word in flat]
    return dict(zip(words[::2], words[1::2], strict=False))


def check_server(reply: dict[str, Any], address: Address, *, has_sentinels: bool) -> Server:
    """Refuse a server that is too old, of another kind, or may not be written to."""
    if reply.get("mode") == "sentinel":
        raise StoreRefused(
            f"{address} is a Sentinel: name it in redis.sentinels, and its master in "
            "redis.sentinel_service"
        )
    if reply.get("mode") == "cluster":
        raise StoreRefused(f"Redis at {address}: {CLUSTER}")
    version = str(reply.get("version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_VERSION:
        raise StoreRefused(
            f"Redis at {address} is version {version}; 6.2 is the oldest that will do"
        )
    if reply.get("role") == "replica":
        if not has_sentinels:
            raise StoreRefused(f"Redis at {address}: {HINTS['READONLY']}")
        raise StoreUnavailable(f"Redis at {address} is a replica by now: failing over")
    return Server(address=str(address), name=str(reply.get("server", "redis")), version=version)
