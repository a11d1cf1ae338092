"""The router's own machine: its ports and files, the configuration, a router that runs already."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from router.addresses import host_port, own_url_host
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.check.replica import ReplicaSeen
from router.config import Config
from router.config.secrets import read_secret
from router.errors import ConfigError
from router.listening import listen, why_not
from router.tls import system_tls

_ASK_S: Final = 2.0
_SAMPLE: Final = re.compile(r"^(warmroute_\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_SIGNS: Final = ("warmroute_", '"replicas"', "admin token")
_PATHS: Final = {"listen": "/metrics", "admin": "/admin/replicas"}
_ENOUGH: Final = 20  # answers: fewer without cached tokens show nothing
_ROUTER: Final = Subject("router")


class FileSeen(Struct, frozen=True):
    """A file that the configuration names; `error` None: it can be used."""

    key: str
    path: str
    error: str | None


class PortSeen(Struct, frozen=True, kw_only=True):
    """A port that the router wants to listen on."""

    key: str  # listen, admin
    host: str
    port: int
    error: str | None  # None: it is free
    is_router: bool = False  # a warmroute listens there


class HostSeen(Struct, frozen=True, kw_only=True):
    """This machine, and what a router that runs here already reports."""

    ports: tuple[PortSeen, ...] = ()
    files: tuple[FileSeen, ...] = ()
    num_answered: int | None = None  # requests of the running router with a usage; None: none runs
    num_audited: int | None = None  # of them those whose usage had cached tokens


# -- look ----------------------------------------------------------------------------------------


async def look(config: Config, deadline: Deadline) -> HostSeen:
    """Try the ports and the files that the configuration names."""
    files = tuple(_files(config))
    listen, page = await _port("listen", config.listen.host, config.listen.port, deadline)
    admin, _ = await _port("admin", config.admin.host, config.admin.port, deadline)
    return HostSeen(
        ports=(listen, admin),
        files=files,
        num_answered=None if page is None else total(page, "warmroute_requests_total"),
        num_audited=None if page is None else total(page, "warmroute_audited_total"),
    )


async def _port(key: str, host: str, port: int, deadline: Deadline) -> tuple[PortSeen, str | None]:
    """Look at a port, and get the page of the router that has it, if one has."""
    error = why_not_free(host, port) if port else None
    page = None
    if error is not None:
        with deadline.waiting("ports"):
            page = await ask_router(key, host, port, timeout_s=deadline.at_most(_ASK_S))
    return PortSeen(key=key, host=host, port=port, error=error, is_router=page is not None), page


def why_not_free(host: str, port: int) -> str | None:
    """Return why a server cannot listen on a port, by trying for a moment; None: it can."""
    try:
        for one in listen(host, port):
            one.close()
    except OSError as exc:
        return why_not(host, exc)
    return None


async def ask_router(key: str, host: str, port: int, *, timeout_s: float) -> str | None:
    """Get the page by which a router is recognized; None: no router answers there.

    Args:
        key: Which of a router's ports it may be, "listen" or "admin".
        host: As it is configured to listen on: a wildcard is asked on loopback.
    """
    try:
        async with httpx.AsyncClient(
            timeout=timeout_s, trust_env=False, verify=system_tls()
        ) as client:
            answer = await client.get(f"http://{own_url_host(host)}:{port}{_PATHS[key]}")
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    # The admin port may want a token: its refusal is enough to recognize it.
    is_ours = answer.status_code in (200, 401) and any(sign in answer.text for sign in _SIGNS)
    return answer.text if is_ours else None


def total(page: str, name: str) -> int:
    """Add up a counter over its labels."""
    return round(sum(float(value) for found, value in _SAMPLE.findall(page) if found == name))


def _files(config: Config) -> Iterator[FileSeen]:
    for key, path in (
        ("engine.api_key_file", config.engine.api_key_file),
        ("admin.token_file", config.admin.token_file),
        ("redis.password_file", config.redis.password_file),
    ):
        if path is not None:
            yield FileSeen(key, str(path), _why_no_secret(path, key))
    for key, path in (
        ("forward.ca_file", config.forward.ca_file),
        ("redis.ca_file", config.redis.ca_file),
    ):
        if path is not None:
            yield FileSeen(key, str(path), _why_no_bundle(path))
    for model, path in config.tokens.chat_templates.items():
        error = None if path.is_file() else "not a file"
        yield FileSeen(f"tokens.chat_templates.{model}", str(path), error)
    if (log := config.log.decisions) is not None:
        yield FileSeen("log.decisions", str(log), _why_no_log(log))


def _why_no_secret(path: Path, key: str) -> str | None:
    try:
        read_secret(path, key)
    except ConfigError as exc:
        return exc.message.removeprefix(f"{key}: ")
    return None


def _why_no_bundle(path: Path) -> str | None:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        return "no certificates in it"
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    return None


def _why_no_log(path: Path) -> str | None:
    """Return why a file cannot be appended to, without creating it; None: it can."""
    if path.is_dir():
        return "a directory"
    if path.exists():
        return None if os.access(path, os.W_OK) else "not writable"
    folder = path.parent
    if not folder.is_dir():
        return "its directory does not exist"
    return None if os.access(folder, os.W_OK) else "its directory is not writable"


# -- judge ---------------------------------------------------------------------------------------


def judge(seen: HostSeen, *, config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge what a router needs of its own machine, and how it is configured."""
    yield from map(_judge_port, seen.ports)
    for file in seen.files:
        if file.error is None:
            yield _ROUTER.ok(file.key, file.path)
        else:
            yield _ROUTER.error(file.key, f"{file.path}: {file.error}")
    if config.listen.port and config.listen.port == config.admin.port:
        yield _ROUTER.error("ports", "listen and admin port are the same", "--admin-port")
    yield from _audit(seen)
    if config.redis.is_configured:
        yield from _shared(config, replicas)


def _judge_port(port: PortSeen) -> Finding:
    where = host_port(port.host, port.port) if port.port else f"{port.host}, any port"
    about = f"{port.key} port"
    if port.error is None:
        return _ROUTER.ok(about, f"{where} is free")
    if port.is_router:
        return _ROUTER.note(about, f"{where}: a router runs there already")
    flag = "--port" if port.key == "listen" else "--admin-port"
    return _ROUTER.error(about, f"{where}: {port.error}", f"{flag} another one")


def _audit(seen: HostSeen) -> Iterator[Finding]:
    """Judge by a running router whether engines report cached tokens."""
    if seen.num_answered is None or seen.num_audited is None:
        yield _ROUTER.note(
            "audit",
            "only a request shows whether engines report cached tokens",
            "--enable-prompt-tokens-details for each engine, so that predictions are checked",
        )
    elif seen.num_audited:
        yield _ROUTER.ok("audit", f"{seen.num_audited:,} predictions checked so far")
    elif seen.num_answered >= _ENOUGH:
        yield _ROUTER.warning(
            "audit",
            f"{seen.num_answered:,} answers, and none reported cached tokens",
            "--enable-prompt-tokens-details for each engine",
        )


def _shared(config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    unnamed = [replica.url for replica in replicas if replica.identity == replica.url]
    local = [url for url in unnamed if "//127.0.0.1" in url or "//localhost" in url]
    if local:
        yield _ROUTER.note(
            "names",
            f"routers share replicas by URL, and {local[0]} is another on each machine",
            "give replicas a `name` in the configuration, the same for every router",
        )
    scheme, _, host = (config.redis.url or "").partition("://")
    if scheme != "rediss" and config.redis.ca_file is not None:
        yield _ROUTER.warning(
            "redis.ca_file",
            f"not used: redis://{host.partition('/')[0]} is not encrypted",
            "write rediss://",
        )
