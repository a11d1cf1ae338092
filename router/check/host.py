"""The router's own machine: its ports and files, and a router that runs here already."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.base.addresses import host_port, own_url_host
from router.base.errors import ConfigError
from router.base.listening import cannot_listen, listen, why_not
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject
from router.check.reach import CONNECT_S, Reach, reach
from router.check.running import RouterSeen, described, kinship, num_of, of_listing, of_metrics
from router.check.seen import ReplicaSeen
from router.config import AdminConfig, Config, ListenConfig, TracingConfig
from router.config.exposure import open_to
from router.config.secrets import read_secret
from router.discovery.prompter_loader import is_missing_folder

_ASK_S: Final = 2.0
_SIGNS: Final = (
    "warmroute_",
    '"replicas"',
    '"findings"',
    "admin token",
    "admin port",
    "listen.trusted",
)
_PATHS: Final = {"listen": "/metrics", "admin": "/admin/replicas"}
_PROMPTS: Final = "/admin/findings"
_MAX_PROMPTS: Final = 5
_ENOUGH: Final = 20  # answers; fewer prove nothing
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
    router: RouterSeen | None = None  # None: it does not say which replicas it has


class CollectorSeen(Struct, frozen=True):
    """The collector of traces; `error`: why OpenTelemetry cannot be used."""

    endpoint: str
    reach: Reach
    error: str | None = None


class HostSeen(Struct, frozen=True, kw_only=True):
    """This machine, and what the metrics of a router on it say."""

    ports: tuple[PortSeen, ...] = ()
    files: tuple[FileSeen, ...] = ()
    collector: CollectorSeen | None = None  # None: nothing is traced
    num_answered: int | None = None  # requests of a router; None: none runs that is meant
    num_audited: int | None = None  # those whose answer reported cached tokens
    prompts: tuple[str, ...] | None = None  # what a router says about them; None: it was not asked
    names: tuple[str, ...] = ()  # what it says about the names of sessions


class _Prompt(Struct):
    text: str
    session: str | None = None  # None: it is about the names of all sessions


class _Prompts(Struct):
    findings: tuple[_Prompt, ...]


# -- look ----------------------------------------------------------------------------------------


async def look(config: Config, deadline: Deadline, *, admin_token: str | None = None) -> HostSeen:
    """Try the ports and the files that the configuration names.

    Args:
        admin_token: Of a router that may run here, so that it has no intruder to log.
    """
    prompts = None
    listen, page = await _port("listen", config.listen, None, deadline)
    listen = replace(listen, router=of_metrics(page))
    if listen.is_router and admin_token is None and not config.admin.open:
        host, port = config.admin.host, config.admin.port
        error = why_not_free(host, port)
        admin = PortSeen(key="admin", host=host, port=port, error=error, is_router=True)
    else:
        admin, said = await _port("admin", config.admin, admin_token, deadline)
        admin = replace(admin, router=of_listing(said))
        if said is not None and '"replicas"' in said:  # it lets us in
            prompts = await _ask(config.admin, _PROMPTS, admin_token, deadline)
    return HostSeen(
        ports=(listen, admin),
        files=tuple(_files(config)),
        collector=await _collector(config.tracing, deadline),
        prompts=_said(prompts, about_names=False),
        names=_said(prompts, about_names=True) or (),
    )


async def _port(
    key: str, section: ListenConfig | AdminConfig, token: str | None, deadline: Deadline
) -> tuple[PortSeen, str | None]:
    """Check a port, and get the page of the router that has it, if one has."""
    host, port = section.host, section.port
    is_shared = isinstance(section, ListenConfig) and section.shared
    error = why_not_free(host, port, shared=is_shared) if port else None
    page = None
    if error is not None:
        page = await _ask(section, _PATHS[key], token, deadline)
    return PortSeen(key=key, host=host, port=port, error=error, is_router=page is not None), page


async def _collector(tracing: TracingConfig, deadline: Deadline) -> CollectorSeen | None:
    """Try to connect to the collector, and to use OpenTelemetry."""
    if tracing.endpoint is None:
        return None
    error = None
    try:
        from router.observers.tracing.export import collector_at  # late: it may not be there

        collector_at(tracing.endpoint).close()
    except ConfigError as exc:
        error = exc.message.removeprefix("tracing.endpoint: ")
    with deadline.waiting("collector"):
        reached = await reach(tracing.endpoint, timeout_s=deadline.at_most(CONNECT_S))
    return CollectorSeen(tracing.endpoint, reached, error)


async def _ask(
    section: ListenConfig | AdminConfig, path: str, token: str | None, deadline: Deadline
) -> str | None:
    scheme = "https" if section.tls_cert is not None else "http"
    url = f"{scheme}://{own_url_host(section.host)}:{section.port}{path}"
    with deadline.waiting("ports"):
        return await ask_router(url, token=token, timeout_s=deadline.at_most(_ASK_S))


def why_not_free(host: str, port: int, *, shared: bool = False) -> str | None:
    """Return why a server cannot listen on a port, by trying for a moment; None: it can."""
    try:
        for one in listen(host, port, shared=shared):
            one.close()
    except OSError as exc:
        return why_not(host, exc)
    return None


async def ask_router(url: str, *, token: str | None = None, timeout_s: float) -> str | None:
    """Get a page of a router on this machine; None: no router answers there."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    try:
        async with httpx.AsyncClient(
            timeout=timeout_s, trust_env=False, verify=_any_tls()
        ) as client:
            answer = await client.get(url, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    # The admin port may want a token: its refusal is enough to recognize it.
    has_sign = any(sign in answer.text for sign in _SIGNS)
    return answer.text if has_sign and answer.status_code in (200, 401, 403, 404) else None


@cache
def _any_tls() -> ssl.SSLContext:
    """Return a context that accepts any certificate: those of this machine have other names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _said(page: str | None, *, about_names: bool) -> tuple[str, ...] | None:
    """Read what a router says about prompts, or about the names of sessions.

    None: it refuses, or is of an older release.
    """
    try:
        found = msgspec.json.decode(page or "", type=_Prompts)
    except msgspec.DecodeError:
        return None
    chosen = [each for each in found.findings if (each.session is None) == about_names]
    return tuple(" ".join(each.text.split()) for each in chosen)


def _files(config: Config) -> Iterator[FileSeen]:
    """Read each file that the configuration names, as a router does at its start."""
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
        error = None if path.is_file() else "it is not a file"
        yield FileSeen(f"tokens.chat_templates.{model}", str(path), error)
    for model, source in config.tokens.models.items():
        if is_missing_folder(source):
            yield FileSeen(f"tokens.models.{model}", source, "there is no such folder")
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


# -- judge ---------------------------------------------------------------------------------------


def judge(seen: HostSeen, *, config: Config, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge what a router needs of its own machine."""
    seen = _meant(seen, replicas)
    for port in seen.ports:
        yield _judge_port(port, replicas)
    for file in seen.files:
        if file.error is None:
            yield _ROUTER.ok(file.key, file.path)
        else:
            yield _ROUTER.error(file.key, f"{file.path}: {file.error}")
    if config.listen.port and config.listen.port == config.admin.port:
        yield _ROUTER.error("ports", "listen.port and admin.port are the same", "--admin-port")
    if (reached_by := open_to(config)) is not None:
        yield _ROUTER.note(
            "clients",
            f"{reached_by} can send requests, without a key",
            "listen on loopback (--host 127.0.0.1), or ask for keys (--tenants-file FILE)",
        )
    if seen.collector is not None:
        yield _judge_collector(seen.collector)
    yield from _audit(seen)
    yield from _judge_prompts(seen.prompts)
    for text in seen.names:
        yield _ROUTER.note("sessions", text, "docs/concepts/sessions.md has all headers")
    if config.redis.is_configured:
        yield from _shared(config, replicas)


def _meant(seen: HostSeen, replicas: Sequence[ReplicaSeen]) -> HostSeen:
    """Drop the requests and prompts of a router that has other replicas than the checked ones."""
    by_key = {port.key: port.router for port in seen.ports}
    listen, admin = by_key.get("listen"), by_key.get("admin")
    if listen is not None and admin is not None and listen.names.keys() == admin.names.keys():
        listen = replace(listen, urls=admin.urls)
        ports = tuple(replace(p, router=listen) if p.key == "listen" else p for p in seen.ports)
        seen = replace(seen, ports=ports)
    if listen is not None and kinship(listen, replicas) == "these":
        num_answered = num_of(listen.answered, replicas)
        num_audited = num_of(listen.audited, replicas)
        seen = replace(seen, num_answered=num_answered, num_audited=num_audited)
    if admin is not None and kinship(admin, replicas) != "these":
        seen = replace(seen, prompts=None, names=())
    return seen


def _judge_port(port: PortSeen, replicas: Sequence[ReplicaSeen]) -> Finding:
    where = host_port(port.host, port.port) if port.port else f"{port.host}, any port"
    about = f"{port.key} port"
    if port.error is None:
        return _ROUTER.ok(about, f"{where} is free")
    flag = "--port" if port.key == "listen" else "--admin-port"
    if port.router is not None:
        text = f"{where} is in use by {described(port.router, replicas)}"
        if kinship(port.router, replicas) == "these":
            return _ROUTER.ok(about, text)
        return _ROUTER.note(about, text, f"a router beside it needs another port: {flag} PORT")
    if port.is_router:
        text = f"{where} is in use by a router that does not say which replicas it has"
        hint = "is its admin token another one? --admin-token-file FILE"
        return _ROUTER.note(about, text, hint if port.key == "admin" else "")
    text = cannot_listen(port.host, port.port, port.error)
    return _ROUTER.error(about, text, f"end the other process, or choose another port: {flag} PORT")


def _judge_collector(collector: CollectorSeen) -> Finding:
    about, hint = "tracing", "start the collector's OTLP/HTTP receiver, or correct tracing.endpoint"
    if collector.error is not None:
        return _ROUTER.error(about, collector.error)
    if collector.reach == "open":
        return _ROUTER.ok(about, f"{collector.endpoint} accepts connections")
    return _ROUTER.warning(about, f"{collector.endpoint}: {collector.reach}; spans are lost", hint)


def _audit(seen: HostSeen) -> Iterator[Finding]:
    """Judge by a running router whether engines report cached tokens."""
    hint = "start each engine with --enable-prompt-tokens-details"
    if seen.num_answered is None:
        text = "the first request will show whether engines report cached tokens"
        yield _ROUTER.note("audit", text, f"{hint}, so that predictions are checked")
    elif seen.num_audited:
        yield _ROUTER.ok("audit", f"{seen.num_audited:,} predictions audited so far")
    elif seen.num_answered >= _ENOUGH:
        text = f"{seen.num_answered:,} answers without reported cached tokens"
        yield _ROUTER.warning("audit", text, hint)


def _judge_prompts(prompts: Sequence[str] | None) -> Iterator[Finding]:
    """Judge the prompts that a running router was sent: what changes early is computed again."""
    if prompts is None:
        return
    if not prompts:
        yield _ROUTER.ok("prompts", "none changes near its beginning in every turn")
    for text in prompts[:_MAX_PROMPTS]:
        yield _ROUTER.note("prompts", text, "`warmroute why` names the sessions")
    if len(prompts) > _MAX_PROMPTS:
        yield _ROUTER.note("prompts", f"{len(prompts) - _MAX_PROMPTS:,} more: `warmroute why`")


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
