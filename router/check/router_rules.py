"""What follows from what was seen of this machine, and from the configuration as a whole. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.check.findings import Finding
from router.check.seen import PortSeen, ReplicaSeen, RouterSeen
from router.config import Config

_ENOUGH = 20  # answers, before their silence about cached tokens means something


def of_router(
    seen: RouterSeen, *, config: Config, replicas: Sequence[ReplicaSeen]
) -> Iterator[Finding]:
    """Judge what a router needs of its own machine, and how it is configured."""
    for port in seen.ports:
        yield _port(port)
    for file in seen.files:
        if file.error is None:
            yield Finding("router", file.key, "ok", file.path)
        else:
            yield Finding("router", file.key, "error", f"{file.path}: {file.error}", "")
    if config.listen.port and config.listen.port == config.admin.port:
        yield Finding(
            "router", "ports", "error", "listen and admin port are the same", "--admin-port"
        )
    yield from _audit(seen)
    if config.redis.is_configured:
        yield from _shared(config, replicas)


def _port(port: PortSeen) -> Finding:
    where = f"{port.host}:{port.port}" if port.port else f"{port.host}, any port"
    about = f"{port.key} port"
    flag = "--port" if port.key == "listen" else "--admin-port"
    if port.error is None:
        return Finding("router", about, "ok", f"{where} is free")
    if port.is_router:
        return Finding("router", about, "note", f"{where}: a router runs there already", "")
    return Finding("router", about, "error", f"{where}: {port.error}", f"{flag} another one")


def _audit(seen: RouterSeen) -> Iterator[Finding]:
    """Tell from a running router whether engines report what they had cached."""
    if seen.num_answered is None or seen.num_audited is None:
        yield Finding(
            "router",
            "audit",
            "note",
            "whether engines report cached tokens cannot be told without a request",
            "--enable-prompt-tokens-details for each engine, so that predictions are checked",
        )
    elif seen.num_audited:
        yield Finding("router", "audit", "ok", f"{seen.num_audited:,} predictions checked so far")
    elif seen.num_answered >= _ENOUGH:
        yield Finding(
            "router",
            "audit",
            "warning",
            f"{seen.num_answered:,} answers, and none said how much was cached",
            "--enable-prompt-tokens-details for each engine",
        )


def _shared(config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    unnamed = [replica.url for replica in replicas if replica.identity == replica.url]
    local = [url for url in unnamed if "//127.0.0.1" in url or "//localhost" in url]
    if local:
        yield Finding(
            "router",
            "names",
            "note",
            f"routers share replicas by URL, and {local[0]} is another on each machine",
            "give replicas a `name` in the configuration, the same for every router",
        )
    is_tls = (config.redis.url or "").startswith("rediss://")
    host = (config.redis.url or "").partition("://")[2]
    if not is_tls and config.redis.ca_file is not None:
        yield Finding(
            "router",
            "redis.ca_file",
            "warning",
            f"of no use: redis://{host.partition('/')[0]} is not encrypted",
            "write rediss://",
        )
