"""Addresses of replicas: one spelling for each, and which of them are the same place.

Two spellings of one URL are one replica, whoever names it: flags, files, sources, the admin API.
"""

from __future__ import annotations

import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

_PORTS: Final = {"http": 80, "https": 443}
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::", "[::]"})
_LOOPBACK: Final = "localhost"


def base_url(text: str) -> str:
    """Write a replica's base URL in one way; what is no such URL stays as it is.

    Scheme and host in lower case, without the scheme's own port, without a slash or `/v1` at the
    end: clients of OpenAI's API have `/v1` in their base URLs.
    """
    url = _split(text)
    if url is None or "@" in url.netloc or url.query or url.fragment:
        return text
    path = url.path.rstrip("/").removesuffix("/v1").rstrip("/")
    host = _bracketed(str(url.hostname))
    port = "" if url.port in (None, _PORTS[url.scheme]) else f":{url.port}"
    return f"{url.scheme}://{host}{port}{path}"


@lru_cache(maxsize=4096)
def place_of(url: str) -> str:
    """Return what two URLs have in common that lead to one server; loopback is one host."""
    split = _split(base_url(url))
    if split is None:
        return url
    return f"{_host(str(split.hostname))}:{split.port or _PORTS[split.scheme]}{split.path}"


def endpoint_place(endpoint: str, url: str) -> str:
    """Return what two event endpoints have in common that are one; `url` is their replica's."""
    try:
        scheme, _, address = reachable_endpoint(endpoint, url).partition("://")
    except ValueError:
        return endpoint
    host, _, port = address.rpartition(":")
    return endpoint if scheme != "tcp" else f"{_host(host.strip('[]').lower())}:{int(port)}"


def reachable_endpoint(endpoint: str, replica_url: str) -> str:
    """Turn the endpoint an engine reports to bind into one to connect to.

    `tcp://*:5557` names every interface of the engine's machine: take the replica's own host. An
    endpoint that names a host stays what it is: for `tcp://*:0` vLLM reports the address it bound.
    (Configured with a host it connects there instead of binding: there is nothing to subscribe to.)

    Raises:
        ValueError: Neither tcp nor ipc, or a tcp endpoint without a port.
    """
    scheme, separator, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        return endpoint
    host, colon, port = address.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdecimal():
        raise ValueError(f"event endpoint {endpoint!r} is not tcp://HOST:PORT or ipc://PATH")
    if host not in _WILDCARDS:
        return endpoint
    replica_host = urlsplit(replica_url).hostname
    if not replica_host:
        raise ValueError(f"replica URL {replica_url!r} names no host")
    return f"tcp://{_bracketed(replica_host)}:{port}"


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Read a host as an address, in every spelling that connects to one; None: it is a name.

    `getaddrinfo` takes 2852039166 and 0xa9fe.0xa9fe for 169.254.169.254, as inet_aton does.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        try:
            address = IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def host_port(host: str, port: int) -> str:
    """Write a host and a port; an IPv6 address gets its brackets."""
    return f"{_bracketed(host)}:{port}"


def unbracketed(host: str) -> str:
    """Write a host to listen on without the brackets that an IPv6 address has in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def own_url_host(host: str) -> str:
    """Return the host by which this machine reaches a server of its own that listens on `host`.

    Every server that listens on all addresses is reached by 127.0.0.1: `::` takes IPv4, too.
    """
    host = unbracketed(host)
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else _bracketed(host)


def bound_url(own_url: str, host: str) -> str:
    """Return the URL of a server of this machine with the host that it listens on."""
    url = urlsplit(own_url)
    return f"{url.scheme}://{host_port(unbracketed(host) or '::', url.port or _PORTS[url.scheme])}"


def _split(text: str) -> SplitResult | None:
    """Split an http or https URL with a host; None: it is none."""
    try:
        url = urlsplit(text.strip())
        is_url = url.scheme in _PORTS and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return None
    return url if is_url else None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _host(host: str) -> str:
    """Write a host in one way; those of this machine alone are one."""
    address = address_of(host)
    if address is None:
        name = host.lower().removesuffix(".")
        return _LOOPBACK if name == "localhost" else name
    is_own = str(address) in ("127.0.0.1", "::1") or address.is_unspecified
    return _LOOPBACK if is_own else str(address)
