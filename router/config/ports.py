"""Settings of the public port and the admin port: addresses, TLS, limits, tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config.ranges import NEAR_HOSTS, Count, Port, Seconds

ADMIN_URL = "WARMROUTE_ADMIN_URL"
ADMIN_TOKEN = "WARMROUTE_ADMIN_TOKEN"
ADMIN_TOKEN_FILE = "WARMROUTE_ADMIN_TOKEN_FILE"
"""Variables of the commands that ask the admin port of a running router; `serve` reads neither."""

_Certificate = Annotated[
    Path | None, Meta(description="certificate and its chain (PEM); the port then speaks HTTPS")
]
_Key = Annotated[
    Path | None,
    Meta(description="key of the certificate (PEM); default: in the certificate's file"),
]
_ClientAuthority = Annotated[
    Path | None, Meta(description="CA bundle; clients must present a certificate that it signed")
]


class ListenConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[
        str,
        Meta(
            description="address or name to listen on. 127.0.0.1: for clients on this machine; "
            "0.0.0.0: for other hosts, too, on every IPv4 address; :: every IPv4 and IPv6 address",
            extra={"flag": "host", "metavar": "ADDRESS"},
        ),
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        Meta(description="port to listen on (0: any)", extra={"flag": "port", "metavar": "PORT"}),
    ] = 8080
    drain_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="time after SIGTERM in which /readyz answers 503 and requests are still "
            "served; must be longer than a front end takes to notice",
        ),
    ] = 5.0
    drain_s: Annotated[
        float, Meta(ge=0, description="time after that for answers in flight to end")
    ] = 20.0
    shared: Annotated[
        bool,
        Meta(
            description="let other routers of the same user on this machine listen on the same "
            "port (Linux). Each needs redis.url, and accepts connections once it is ready",
            extra={"flag": "share-port"},
        ),
    ] = False
    detail_headers: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="which clients get headers with replica, policy and cached tokens "
            "(x-warmroute-…). auto: clients on loopback or in listen.trusted",
        ),
    ] = "auto"
    trusted: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) of clients that are treated like those on loopback"),
    ] = ()
    tls_cert: _Certificate = None
    tls_key: _Key = None
    tls_client_ca: _ClientAuthority = None


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address of the admin API")] = "127.0.0.1"
    port: Annotated[
        Port,
        Meta(
            description="port of the admin API (0: any)",
            extra={"flag": "admin-port", "metavar": "PORT"},
        ),
    ] = 8081
    token_file: Annotated[
        Path | None,
        Meta(
            description="file with the admin bearer token; default: the user's own, made at the "
            "first start (see docs/reference/admin.md)"
        ),
    ] = None
    open: Annotated[
        bool, Meta(description="require no token; only on loopback, and only for tests")
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="host names that requests to the admin port may use; addresses and "
            "localhost are always allowed"
        ),
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
            description="start without replicas, if the admin API adds them later",
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
            description="size of all request bodies in flight; more get 503",
        ),
    ] = 1024 * 1024 * 1024
    receive_timeout_s: Annotated[
        Seconds, Meta(description="time a client has to send its body")
    ] = 60.0
    keepalive_timeout_s: Annotated[
        Seconds,
        Meta(
            description="idle time after which a connection is closed, even if headers are half "
            "sent; must be longer than the front end's own"
        ),
    ] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        Meta(description="longest time in which a client may read nothing of its answer"),
    ] = 60.0
    connections: Annotated[
        Count | None,
        Meta(
            description="client connections at once; default: what the limit of open files allows, "
            "at most 16,384",
        ),
    ] = None


class TenantsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: Annotated[
        Path | None,
        Meta(
            description="YAML file of tenants, their keys (hashed) and limits; default: requests "
            "are not authenticated",
            extra={"flag": "tenants-file", "metavar": "FILE"},
        ),
    ] = None
