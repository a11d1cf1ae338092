"""A Redis server: its address, and what it says of itself."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from router.base.errors import StoreRefused, StoreUnavailable
from router.cluster.redis_errors import HINTS

Mode = Literal["standalone", "sentinel"]

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
    mode: Mode


def parse_url(text: str | None) -> tuple[str, Address | None, int]:
    """Read a URL that router.config has checked: scheme, address (None: none given), database."""
    if text is None:
        return "redis", None, 0
    url = urlsplit(text)
    if url.scheme == "unix":
        db = int(parse_qs(url.query).get("db", ["0"])[0])
        return url.scheme, Address(unquote(url.path), 0), db
    return (
        url.scheme,
        Address(url.hostname or "", url.port or 6379),
        int(url.path.strip("/") or 0),
    )


def address_of(text: str) -> Address:
    """Read HOST:PORT, as `redis.sentinels` has it."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def as_map(flat: Any) -> dict[str, Any]:
    """Read a map as RESP 2 has it: names and values by turns; empty if it is none."""
    if not isinstance(flat, list):
        return {}
    words = [word.decode() if isinstance(word, bytes) else word for word in flat]
    return dict(zip(words[::2], words[1::2], strict=False))


def check_server(reply: dict[str, Any], address: Address, mode: Mode) -> Server:
    """Refuse a server that is too old or may not be written to."""
    version = str(reply.get("version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_VERSION:
        raise StoreRefused(
            f"Redis at {address} is version {version}; 6.2 is the oldest that will do"
        )
    if reply.get("role") == "replica":
        if mode == "standalone":
            raise StoreRefused(f"Redis at {address}: {HINTS['READONLY']}")
        raise StoreUnavailable(f"Redis at {address} is a replica by now: failing over")
    return Server(
        address=str(address), name=str(reply.get("server", "redis")), version=version, mode=mode
    )
