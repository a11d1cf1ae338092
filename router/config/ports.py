"""Settings of the public port and the admin port: addresses, TLS, limits, tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config.ranges import NEAR_HOSTS, Count, Port, Seconds

ADMIN_URL = "WARMROUTE_ADMIN_URL"
ADMIN_TOKEN = "WARMROUTE_ADMIN_TOKEN"
"""Variables of the commands that ask the admin port of a running router; `serve` reads neither."""

_Certificate = Annotated[
    Path | None, Meta(description="certificate and its chain (PEM): then it is https")
]
_Key = Annotated[
    Path | None, Meta(description="its key (PEM); default: in the file of the certificate")
]
_ClientAuthority = Annotated[
    Path | None, Meta(description="CA bundle; clients must then show a certificate of it")
]


class ListenConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[
        str,
        Meta(
            description="address or name to listen on; 0.0.0.0 is every IPv4 address, :: every "
            "IPv4 and IPv6 address",
            extra={"flag": "host"},
        ),
    ] = "0.0.0.0"
    port: Annotated[
        Port, Meta(description="port to listen on (0: any)", extra={"flag": "port"})
    ] = 8080
    drain_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="after SIGTERM, time that /readyz says 503 while requests are still "
            "served: longer than a front end takes to notice",
        ),
    ] = 5.0
    drain_s: Annotated[
        float, Meta(ge=0, description="time that answers in flight get after that to end")
    ] = 20.0
    shared: Annotated[
        bool,
        Meta(
            description="other routers of the same user on this machine may listen on the port, "
            "too: each takes connections once it is ready (Linux)",
            extra={"flag": "share-port"},
        ),
    ] = False
    detail_headers: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="which clients get replica, policy and cached tokens (x-warmroute-…) "
            "with an answer: auto: those on loopback or in listen.trusted",
        ),
    ] = "auto"
    trusted: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) of clients that get what those on loopback get"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="web pages that may read answers, by origin (https://HOST[:PORT]); "
            "*: all, as in vLLM"
        ),
    ] = ("*",)
    tls_cert: _Certificate = None
    tls_key: _Key = None
    tls_client_ca: _ClientAuthority = None


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address of the admin API")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the admin API (0: any)")] = 8081
    token_file: Annotated[
        Path | None,
        Meta(
            description="file with the admin bearer token; default: the user's own, made at the "
            "first start (see docs/reference/admin.md)"
        ),
    ] = None
    open: Annotated[
        bool, Meta(description="ask for no token; on loopback only, and only for tests")
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Meta(description="names the admin port may be called by; addresses and localhost always"),
    ] = ()
    replica_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts that may be added as replicas: loopback, private, a network, a "
            "name, .SUFFIX, or * for names without a dot; never link-local"
        ),
    ] = NEAR_HOSTS
    allow_empty: Annotated[
        bool,
        Meta(
            description="start without replicas: the admin API will add some",
            extra={"flag": "allow-empty"},
        ),
    ] = False
    tls_cert: _Certificate = None
    tls_key: _Key = None
    tls_client_ca: _ClientAuthority = None


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body_bytes: Annotated[int, Meta(gt=0, description="largest request body")] = 32 * 1024 * 1024
    inflight_bytes: Annotated[
        int,
        Meta(
            gt=0,
            description="bodies of all requests in flight and messages of WebSockets, together; "
            "beyond: 503",
        ),
    ] = 1024 * 1024 * 1024
    header_bytes: Annotated[int, Meta(ge=1024, description="largest header line")] = 16_384
    receive_timeout_s: Annotated[
        Seconds, Meta(description="time a client has to send its body")
    ] = 60.0
    header_timeout_s: Annotated[
        Seconds, Meta(description="time a new connection has to send its first headers")
    ] = 15.0
    keepalive_timeout_s: Annotated[
        Seconds,
        Meta(
            description="an idle connection is closed after it, next headers half sent or not; "
            "longer than a front end's own"
        ),
    ] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        Meta(description="longest time a client may take nothing of what is there for it"),
    ] = 60.0
    connections: Annotated[
        Count | None,
        Meta(
            description="client connections at once; default: what the limit of open files "
            "allows, 16,384 at most",
        ),
    ] = None
    connections_per_address: Annotated[
        Count | None,
        Meta(description="of these, from one address; default: any (a front end is one)"),
    ] = None
    websockets: Annotated[
        Count, Meta(description="open WebSockets (/v1/realtime); beyond: 503")
    ] = 256
    websocket_message_bytes: Annotated[
        int, Meta(ge=1_024, description="largest message of a WebSocket, either way")
    ] = 4 * 1024 * 1024
    websocket_idle_s: Annotated[
        Seconds,
        Meta(description="a WebSocket on which neither side says anything is closed after it"),
    ] = 600.0


class TenantsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: Annotated[
        Path | None,
        Meta(
            description="YAML file of tenants, their keys (hashed) and limits; default: requests "
            "are not authenticated"
        ),
    ] = None
