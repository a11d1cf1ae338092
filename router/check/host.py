"""The router's own machine: its ports and files, and who can reach it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import httpx

from router.base.addresses import host_port, own_url_host
from router.base.errors import ConfigError
from router.base.listening import cannot_listen, listen, why_not
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.check.reach import CONNECT_S, reach
from router.check.seen import ReplicaSeen
from router.config import AdminConfig, Config, ListenConfig
from router.config.exposure import open_to
from router.config.secrets import read_secret
from router.discovery.prompter_loader import is_missing_folder

_ASK_S: Final = 2.0
_SIGNS: Final = {
    "listen": ("/metrics", ("warmroute_", "listen.trusted", "admin port")),
    "admin": ("/", ("<title>warmroute<",)),
}
"""A page of a router that needs no token, and what it has."""
_ROUTER: Final = Subject("router")


async def look(config: Config, deadline: Deadline) -> list[Finding]:
    """Try the ports, and the collector of traces."""
    found = [
        await _port("listen", config.listen, deadline),
        await _port("admin", config.admin, deadline),
    ]
    if config.tracing.endpoint is not None:
        found.append(await _collector(config.tracing.endpoint, deadline))
    return found


async def _port(key: str, section: ListenConfig | AdminConfig, deadline: Deadline) -> Finding:
    host, port, about = section.host, section.port, f"{key} port"
    where = host_port(host, port) if port else f"{host}, any port"
    is_shared = isinstance(section, ListenConfig) and section.shared
    error = why_not_free(host, port, shared=is_shared) if port else None
    if error is None:
        return _ROUTER.ok(about, f"{where} is free")
    flag = "--port" if key == "listen" else "--admin-port"
    path, signs = _SIGNS[key]
    scheme = "https" if section.tls_cert is not None else "http"
    url = f"{scheme}://{own_url_host(host)}:{port}{path}"
    text = await _page(url, timeout_s=deadline.at_most(_ASK_S))
    if any(sign in text for sign in signs):
        return _ROUTER.note(
            about,
            f"{where} is in use by a running router",
            f"`warmroute status` describes it; a router beside it needs another port: {flag} PORT",
        )
    hint = f"end the other process, or choose another port: {flag} PORT"
    return _ROUTER.error(about, cannot_listen(host, port, error), hint)


def why_not_free(host: str, port: int, *, shared: bool = False) -> str | None:
    """Return why a server cannot listen on a port, by trying for a moment; None: it can."""
    try:
        for one in listen(host, port, shared=shared):
            one.close()
    except OSError as exc:
        return why_not(host, exc)
    return None


async def _page(url: str, *, timeout_s: float) -> str:
    """Get a page of this machine; "": none answers. Certificates have other names than ours."""
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=False) as client:
            return (await client.get(url)).text
    except (httpx.HTTPError, httpx.InvalidURL):
        return ""


async def _collector(endpoint: str, deadline: Deadline) -> Finding:
    """Try to connect to the collector of traces, and to use OpenTelemetry."""
    try:
        from router.observers.tracing.build import collector_at  # late: it may not be there

        collector_at(endpoint).shutdown()
    except ConfigError as exc:
        return _ROUTER.error("tracing", exc.message.removeprefix("tracing.endpoint: "))
    reached = await reach(endpoint, timeout_s=deadline.at_most(CONNECT_S))
    if reached == "open":
        return _ROUTER.ok("tracing", f"{endpoint} accepts connections")
    hint = "start the collector's OTLP/HTTP receiver, or correct tracing.endpoint"
    return _ROUTER.warning("tracing", f"{endpoint}: {reached}; spans are lost", hint)


def judge(config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge what a router needs of its own machine, and who can reach it."""
    for key, path, error in _files(config):
        if error is None:
            yield _ROUTER.ok(key, str(path))
        else:
            yield _ROUTER.error(key, f"{path}: {error}")
    if config.listen.port and config.listen.port == config.admin.port:
        yield _ROUTER.error("ports", "listen.port and admin.port are the same", "--admin-port")
    if (reached_by := open_to(config)) is not None:
        yield _ROUTER.note(
            "clients",
            f"{reached_by} can send requests, without a key",
            "listen on loopback (--host 127.0.0.1), or ask for keys (--tenants-file FILE)",
        )
    yield _ROUTER.note(
        "audit",
        "the first request will show whether engines report cached tokens",
        "start each engine with --enable-prompt-tokens-details, so that predictions are checked",
    )
    if config.redis.is_configured:
        yield from _shared(config, replicas)


def _files(config: Config) -> Iterator[tuple[str, object, str | None]]:
    """Read each file that the configuration names, as a router does at its start.

    Yields:
        The key, the file, and why it cannot be used; None: it can.
    """
    files: list[tuple[str, Path | None, Callable[[Path], str | None]]] = [
        ("engine.api_key_file", config.engine.api_key_file, _why_no_secret),
        ("admin.token_file", config.admin.token_file, _why_no_secret),
        ("redis.password_file", config.redis.password_file, _why_no_secret),
        ("forward.ca_file", config.forward.ca_file, _why_no_bundle),
        ("redis.ca_file", config.redis.ca_file, _why_no_bundle),
        ("log.decisions", config.log.decisions, _why_no_log),
    ]
    yield from ((key, path, why(path)) for key, path, why in files if path is not None)
    for model, template in config.tokens.chat_templates.items():
        error = None if template.is_file() else "it is not a file"
        yield f"tokens.chat_templates.{model}", template, error
    for model, source in config.tokens.models.items():
        if is_missing_folder(source):
            yield f"tokens.models.{model}", source, "there is no such folder"


def _why_no_secret(path: Path) -> str | None:
    try:
        read_secret(path, "file")
    except ConfigError as exc:
        return exc.message.removeprefix("file: ")
    return None


def _why_no_bundle(path: Path) -> str | None:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        return "it has no certificates"
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    return None


def _why_no_log(path: Path) -> str | None:
    """Return why a file cannot be appended to, without creating it; None: it can."""
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return "its directory does not exist"
    what, at = ("it", path) if path.exists() else ("its directory", path.parent)
    return None if os.access(at, os.W_OK) else f"{what} is not writable"


def _shared(config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    unnamed = [replica.url for replica in replicas if replica.identity == replica.url]
    local = [url for url in unnamed if "//127.0.0.1" in url or "//localhost" in url]
    if local:
        yield _ROUTER.note(
            "names",
            f"routers share replicas by URL, and {local[0]} is a different one on each machine",
            "give each replica a `name` in the configuration, the same for every router",
        )
    scheme, _, host = (config.redis.url or "").partition("://")
    if scheme != "rediss" and config.redis.ca_file is not None:
        yield _ROUTER.warning(
            "redis.ca_file",
            f"not used: redis://{host.partition('/')[0]} is not encrypted",
            "use rediss://",
        )
