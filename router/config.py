"""The one configuration tree: sections, defaults, units; and how it is read.

A default exists in one place, the Struct field. `load` merges, weakest first: defaults, the YAML
file, `WARMROUTE_…` variables, command-line flags. Unknown keys are refused with the nearest
known one. No other module reads the environment; a module receives its section, not the whole.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta, Struct

from policies.naming import split
from policies.policy import Policy
from policies.registry import create
from router.api.clients import network
from router.api.routes import check_pattern
from router.api.withheld import FIELDS
from router.errors import ConfigError
from router.experiments.definition import Experiment, check_all, check_replicas
from router.hosts import HostRules

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
ClientField = Literal["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority"]

REDIS_PASSWORD = "WARMROUTE_REDIS_PASSWORD"
"""The variable with the password of Redis. No flag, no key: both are read by others."""


class ReplicaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vLLM server. Everything but `url` is found out; set it to overrule."""

    url: Annotated[str, Meta(description="base URL, e.g. http://10.0.0.5:8000")]
    name: Annotated[
        str | None, Meta(description="name in metrics and headers; default r1, r2, …")
    ] = None
    events: Annotated[
        tuple[str, ...],
        Meta(description="KV event PUB endpoints, one per rank, e.g. tcp://10.0.0.5:5557"),
    ] = ()
    replay: Annotated[
        tuple[str, ...], Meta(description="KV event replay endpoints, one per rank")
    ] = ()
    pool: Annotated[
        bool | None,
        Meta(description="whether it takes part in the Mooncake pool; default: found out"),
    ] = None

    @property
    def identity(self) -> str:
        """What routers call this replica among themselves: each may number its own differently."""
        return self.name or self.url.rstrip("/")


class ListenConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address to listen on", extra={"flag": "host"})] = (
        "0.0.0.0"
    )
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
    detail_headers: Annotated[
        str,
        Meta(
            pattern="^(auto|always|never)$",
            description="who is told replica, policy and cached tokens (x-warmroute-…) of an "
            "answer: auto: clients on loopback or in listen.trusted",
        ),
    ] = "auto"
    trusted: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) of clients that are told as much as those on loopback"),
    ] = ()
    tls_cert: Annotated[
        Path | None, Meta(description="certificate and its chain (PEM): then it is https")
    ] = None
    tls_key: Annotated[
        Path | None, Meta(description="its key (PEM); default: in the file of the certificate")
    ] = None
    tls_client_ca: Annotated[
        Path | None, Meta(description="CA bundle; clients must then show a certificate of it")
    ] = None


class AdminConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address of the admin API")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the admin API (0: any)")] = 8081
    token_file: Annotated[
        Path | None,
        Meta(
            description="file with the admin bearer token; default: the user's own, made at the "
            "first start (see docs/admin.md)"
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
    ] = ("loopback", "private", "*", ".svc", ".svc.cluster.local")
    allow_empty: Annotated[
        bool,
        Meta(
            description="start without replicas: the admin API will add some",
            extra={"flag": "allow-empty"},
        ),
    ] = False
    tls_cert: Annotated[
        Path | None, Meta(description="certificate and its chain (PEM): then it is https")
    ] = None
    tls_key: Annotated[
        Path | None, Meta(description="its key (PEM); default: in the file of the certificate")
    ] = None
    tls_client_ca: Annotated[
        Path | None, Meta(description="CA bundle; clients must then show a certificate of it")
    ] = None


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[
        str, Meta(description="routing policy (see `warmroute policies`)", extra={"flag": "policy"})
    ] = "kv_aware"
    params: Annotated[
        dict[str, Any],
        Meta(description="NAME=VALUE, repeatable", extra={"flag": "policy-param"}),
    ] = {}
    first_blocks_tokens: Annotated[
        int, Meta(gt=0, description="prompt tokens that prefix_hash looks at")
    ] = 2048


class TokensConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: Annotated[
        dict[str, str],
        Meta(description="served model -> directory or hub name of its tokenizer, NAME=PATH"),
    ] = {}
    chat_templates: Annotated[
        dict[str, Path],
        Meta(description="served model -> template file, if the engine got --chat-template"),
    ] = {}
    cache_tokens: Annotated[
        int, Meta(ge=0, description="prompt tokens remembered for incremental encoding, per model")
    ] = 20_000_000
    inline_chars: Annotated[
        int, Meta(ge=0, description="encodes with more new text than this leave the event loop")
    ] = 32_768
    prove_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of requests, and of the time, spent on proving tokens exact",
        ),
    ] = 0.01
    engine_timeout_s: Annotated[
        Seconds, Meta(description="deadline for an engine that tokenizes for us")
    ] = 2.0


class HashConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seeds: Annotated[
        tuple[str, ...],
        Meta(description="PYTHONHASHSEED of the engines, if set; tried first"),
    ] = ()


class EventsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: Annotated[bool, Meta(description="follow the engines' KV events")] = True
    replay_timeout_s: Annotated[Seconds, Meta(description="deadline for one replay")] = 5.0


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    api_key_file: Annotated[
        Path | None,
        Meta(description="file with the engines' --api-key, for discovery; clients send their own"),
    ] = None
    key_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts of added replicas that may be sent that key, too, as in "
            "admin.replica_hosts; configured replicas always are"
        ),
    ] = ()


class MooncakeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that replicas share (vLLM's MooncakeStoreConnector)."""

    master: Annotated[
        str | None,
        Meta(
            description="base URL of the Mooncake master's --metrics_port, e.g. http://10.0.0.5:9003",
            extra={"flag": "mooncake"},
        ),
    ] = None
    events: Annotated[
        str | None,
        Meta(description="endpoint of the master's event stream, if it has one, tcp://HOST:PORT"),
    ] = None
    timeout_s: Annotated[Seconds, Meta(description="longest silence of the master")] = 5.0
    poll_s: Annotated[Seconds, Meta(description="pause between looks at the master's counters")] = (
        1.0
    )
    list_s: Annotated[
        Seconds, Meta(description="longest pause between listings of the pool's keys")
    ] = 60.0
    verify_timeout_s: Annotated[
        Seconds, Meta(description="deadline for verifying what a decision would fetch")
    ] = 0.025
    verify_keys: Annotated[
        int, Meta(ge=0, le=4096, description="objects asked for at once then; 0: none, never")
    ] = 512


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body_bytes: Annotated[int, Meta(gt=0, description="largest request body")] = 32 * 1024 * 1024
    inflight_bytes: Annotated[
        int, Meta(gt=0, description="bodies of all requests in flight together; beyond: 503")
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


class ForwardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_timeout_s: Annotated[Seconds, Meta(description="time to connect to a replica")] = 2.0
    first_byte_timeout_s: Annotated[
        Seconds, Meta(description="time to the first byte of the answer")
    ] = 600.0
    idle_timeout_s: Annotated[Seconds, Meta(description="longest silence inside an answer")] = 120.0
    max_tries: Annotated[
        int, Meta(ge=1, description="replicas tried before a client sees a failure")
    ] = 3
    retry_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the requests of the last 10 s that may be sent a second time, "
            "beyond ten; what a replica loses at once counts as one",
        ),
    ] = 0.2
    retry_backoff_s: Annotated[
        float,
        Meta(ge=0, description="longest pause before the second try; drawn, doubled for a third"),
    ] = 0.05
    continue_streams: Annotated[
        bool,
        Meta(
            description="whether a stream whose engine dies goes on at another replica, where "
            "that gives the same answer (docs/failures.md)"
        ),
    ] = True
    keepalive_s: Annotated[
        Seconds,
        Meta(description="idle time of pooled connections; below the engine's own 5 s"),
    ] = 4.0
    overdue_ratio: Annotated[
        float,
        Meta(
            ge=0,
            description="a first token is overdue after this many times its predicted time and "
            "four times the predictions' mean error; it moves on where it would be sooner. "
            "0: never",
        ),
    ] = 3.0
    overdue_floor_s: Annotated[
        Seconds, Meta(description="no first token is overdue before this time")
    ] = 10.0
    max_connections: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="requests at replicas at once, 503 beyond; default: what half of the "
            "descriptors allow (ulimit -n)",
        ),
    ] = None
    ca_file: Annotated[Path | None, Meta(description="CA bundle for https replicas")] = None
    client_cert: Annotated[
        Path | None, Meta(description="certificate (PEM) to show to https replicas")
    ] = None
    client_key: Annotated[
        Path | None, Meta(description="its key (PEM); default: in the file of the certificate")
    ] = None
    routes: Annotated[
        tuple[str, ...],
        Meta(
            description="engine routes that clients may use besides inference, models and tokens: "
            "/path, /prefix/* or METHOD /path; never those that control an engine"
        ),
    ] = ()
    client_fields: Annotated[
        tuple[ClientField, ...],
        Meta(
            description="fields that clients may send to engines, of those taken out by default: "
            + ", ".join(FIELDS)
        ),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) of proxies in front whose X-Forwarded-For is believed"),
    ] = ()


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    interval_s: Annotated[Seconds, Meta(description="pause between health probes")] = 2.0
    timeout_s: Annotated[Seconds, Meta(description="deadline of one probe")] = 5.0
    load_interval_s: Annotated[
        Seconds, Meta(description="pause between reads of an engine's /metrics")
    ] = 5.0


class SessionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    headers: Annotated[
        tuple[str, ...], Meta(description="request headers that may carry a session id, in order")
    ] = (
        "x-session-id",
        "x-claude-code-session-id",
        "x-session-affinity",
        "session-id",
        "session_id",
    )
    ttl_s: Annotated[Seconds, Meta(description="a session is forgotten after this silence")] = (
        3600.0
    )
    max_sessions: Annotated[int, Meta(gt=0, description="sessions remembered")] = 100_000


class TenantsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: Annotated[
        Path | None,
        Meta(
            description="YAML file of tenants, their keys (hashed) and limits; default: requests "
            "are not authenticated"
        ),
    ] = None


class RedisConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What several routers share. The password is no part of this tree: see `redis_password`."""

    url: Annotated[
        str | None,
        Meta(
            description="Redis or Valkey that routers share: redis://HOST:PORT/DB, rediss:// (TLS) "
            "or unix://PATH?db=DB; any node of a Cluster",
            extra={"flag": "redis"},
        ),
    ] = None
    username: Annotated[str | None, Meta(description="ACL user; default: Redis's default user")] = (
        None
    )
    password_file: Annotated[
        Path | None,
        Meta(description="file with the password; or set WARMROUTE_REDIS_PASSWORD"),
    ] = None
    ca_file: Annotated[Path | None, Meta(description="CA bundle for rediss://")] = None
    sentinels: Annotated[
        tuple[str, ...],
        Meta(description="Sentinels, HOST:PORT each; the url then gives scheme and DB alone"),
    ] = ()
    sentinel_service: Annotated[
        str | None, Meta(description="name that the Sentinels know the master by")
    ] = None
    namespace: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z0-9._-]{1,64}$",
            description="routers of one namespace are one; letters, digits, '.', '_', '-'",
        ),
    ] = "default"
    timeout_s: Annotated[Seconds, Meta(description="deadline of one operation")] = 2.0
    lookup_timeout_s: Annotated[
        Seconds,
        Meta(description="deadline of a look-up in index.mode redis; then the local view counts"),
    ] = 0.02
    lease_s: Annotated[
        float,
        Meta(ge=0.5, description="a router not heard of for so long is taken for dead"),
    ] = 3.0
    log_entries: Annotated[
        int,
        Meta(ge=1000, description="entries kept in each stream, and none older than a minute"),
    ] = 100_000

    @property
    def is_configured(self) -> bool:
        """Whether there is a Redis at all."""
        return self.url is not None or bool(self.sentinels)


class IndexConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        str,
        Meta(
            pattern="^(local|redis)$",
            description="where requests are matched: in the local copy, or in Redis itself",
        ),
    ] = "local"


class ShadowPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that is asked, but not followed."""

    name: str
    params: dict[str, Any] = {}


class ShadowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policies: Annotated[
        tuple[ShadowPolicy, ...],
        Meta(
            max_length=8,
            description="policies to put every decision to as well, without following them: "
            "NAME or NAME:PARAM=VALUE[:PARAM=VALUE…]",
            extra={"flag": "shadow"},
        ),
    ] = ()
    share: Annotated[float, Meta(ge=0, le=1, description="share of decisions put to them")] = 1.0


class ExperimentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    definitions: Annotated[
        tuple[Experiment, ...],
        Meta(
            description="experiments on live traffic: mappings, or YAML files of one each",
            extra={"flag": "experiment"},
        ),
    ] = ()


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$", description="log level")] = (
        "info"
    )
    json: Annotated[bool, Meta(description="log JSON lines")] = False
    decisions: Annotated[
        Path | None,
        Meta(description="file for decision records (JSON lines)", extra={"flag": "decision-log"}),
    ] = None


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: Annotated[
        tuple[ReplicaConfig, ...],
        Meta(description="base URL of a vLLM server, repeatable", extra={"flag": "replica"}),
    ] = ()
    listen: ListenConfig = ListenConfig()
    admin: AdminConfig = AdminConfig()
    policy: PolicyConfig = PolicyConfig()
    tokens: TokensConfig = TokensConfig()
    hash: HashConfig = HashConfig()
    events: EventsConfig = EventsConfig()
    engine: EngineConfig = EngineConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    limits: LimitsConfig = LimitsConfig()
    forward: ForwardConfig = ForwardConfig()
    health: HealthConfig = HealthConfig()
    session: SessionConfig = SessionConfig()
    tenants: TenantsConfig = TenantsConfig()
    redis: RedisConfig = RedisConfig()
    index: IndexConfig = IndexConfig()
    shadow: ShadowConfig = ShadowConfig()
    experiment: ExperimentConfig = ExperimentConfig()
    log: LogConfig = LogConfig()


class Option(NamedTuple):
    """One leaf of the tree as the command line shows it."""

    path: tuple[str, ...]  # ("listen", "port")
    flag: str  # "port"
    variable: str  # "WARMROUTE_LISTEN_PORT"
    description: str
    default: Any
    kind: type | None  # bool, int, float, str; None: a list
    mapping: bool = False


def options(section: type[Struct] = Config, prefix: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield every option of the tree, in order."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        path = (*prefix, field.name)
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from options(hint, path)
            continue
        metas = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)]
        described = next(m for m in reversed(metas) if m.description)
        base = get_args(hint)[0] if metas else hint
        origin = get_origin(base)
        yield Option(
            path=path,
            flag=(described.extra or {}).get("flag", "-".join(path).replace("_", "-")),
            variable="_".join(("WARMROUTE", *path)).upper(),
            description=described.description or "",
            default=None if field.default is msgspec.NODEFAULT else field.default,
            kind=None if origin in (tuple, dict) else _scalar(base),
            mapping=origin is dict,
        )


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, ...], Any] | None = None,
) -> Config:
    """Read the configuration.

    Raises:
        ConfigError: unreadable file, unknown key, value of the wrong type or range; the message
            names the key and what is allowed.
    """
    tree: dict[str, Any] = read_yaml(file) if file is not None else {}
    for option in options():
        text = (environ or {}).get(option.variable)
        if text is not None:
            _put(tree, option.path, _from_text(option, text))
        value = (flags or {}).get(option.path)
        if value is not None:
            _put(tree, option.path, value)
    redis = tree.get("redis")
    if isinstance(redis, dict) and "password" in redis:
        raise ConfigError(
            f"redis.password: not in the file; put it into {REDIS_PASSWORD} or into a file of its "
            "own that redis.password_file names",
            param="redis.password",
        )
    replicas = tree.get("replicas")
    for i, replica in enumerate(replicas if isinstance(replicas, list) else ()):
        if isinstance(replica, str):  # `--replica URL`, or a bare URL in the file
            tree["replicas"][i] = {"url": replica}
    _expand(tree, "shadow", "policies", _shadow)
    _expand(tree, "experiment", "definitions", lambda text, _: read_yaml(Path(text), Experiment))
    try:
        config = msgspec.convert(tree, Config, strict=False, dec_hook=_path)
    except msgspec.ValidationError as exc:
        raise explained(str(exc)) from exc
    except UnicodeEncodeError as exc:  # as Python reads odd bytes of the environment, and of flags
        raise ConfigError(f"{exc.object!r}: a value must be UTF-8") from exc
    _check(config)
    return config


def experiment_of(tree: Mapping[str, Any]) -> Experiment:
    """Read one experiment's definition, as it is in a file; its sense is not checked.

    Raises:
        ConfigError: unknown key, value of the wrong type or range; the message names the key.
    """
    try:
        return msgspec.convert(tree, Experiment, strict=False)
    except msgspec.ValidationError as exc:
        raise explained(str(exc), Experiment) from exc


def _expand(
    tree: dict[str, Any], section: str, key: str, made: Callable[[str, str], dict[str, Any]]
) -> None:
    """Make mappings of those entries of a list that are text."""
    node = tree.get(section)
    entries = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(entries, list):
        node[key] = [
            made(entry, f"{section}.{key}[{i}]") if isinstance(entry, str) else entry
            for i, entry in enumerate(entries)
        ]


def _shadow(text: str, key: str) -> dict[str, Any]:
    try:
        name, params = split(text)
    except ValueError as exc:
        raise ConfigError(f"{key}: {exc}", param=key) from exc
    return {"name": name, "params": params}


def redis_password(redis: RedisConfig, environ: Mapping[str, str]) -> str | None:
    """Read the password of Redis, from its file or else its variable; None: there is none.

    It never becomes a part of the tree, so nothing that shows the tree can show it.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if redis.password_file is None:
        return environ.get(REDIS_PASSWORD) or None
    key = "redis.password_file"
    try:
        password = redis.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as exc:
        raise ConfigError(f"{key}: {redis.password_file}: {exc.strerror}", param=key) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{key}: {redis.password_file}: not UTF-8", param=key) from exc
    if not password:
        raise ConfigError(f"{key}: {redis.password_file} is empty", param=key)
    return password


def _path(kind: type, value: Any) -> Any:
    """Decode what msgspec does not know: file names. What is wrong it reports with its place."""
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("Expected a file name")


def _check(config: Config) -> None:
    """Refuse what types cannot: URLs without a host, names used twice, an open admin port."""
    names: set[str] = set()
    for i, replica in enumerate(config.replicas):
        key = f"replicas[{i}]"
        check_replica(replica, f"{key}.")
        name = replica.name or f"r{i + 1}"
        if name in names:
            raise ConfigError(f"{key}.name: {name!r} is used twice", param=f"{key}.name")
        names.add(name)
    if config.mooncake.master is not None:
        _check_url(config.mooncake.master, "mooncake.master")
    if config.mooncake.events is not None:
        _check_endpoints((config.mooncake.events,), "mooncake.events")
    if config.admin.host not in ("127.0.0.1", "::1", "localhost") and config.admin.open:
        raise ConfigError(
            f"admin.open: not where others can reach the port (admin.host: {config.admin.host!r})",
            param="admin.open",
        )
    for i, pattern in enumerate(config.forward.routes):
        if wrong := check_pattern(pattern):
            raise ConfigError(f"forward.routes[{i}]: {wrong}", param=f"forward.routes[{i}]")
    _check_hosts(config.admin.replica_hosts, "admin.replica_hosts")
    _check_hosts(config.engine.key_hosts, "engine.key_hosts")
    _check_networks(config.listen.trusted, "listen.trusted")
    _check_networks(config.forward.trusted_proxies, "forward.trusted_proxies")
    _check_redis(config.redis)
    if config.index.mode == "redis" and not config.redis.is_configured:
        raise ConfigError("index.mode: redis needs redis.url (--redis)", param="index.mode")
    _check_shadows(config.shadow)
    _check_experiments(config)


def _check_hosts(patterns: tuple[str, ...], key: str) -> None:
    try:
        HostRules(patterns)
    except ValueError as exc:
        raise ConfigError(f"{key}: {exc}", param=key) from exc


def _check_networks(texts: tuple[str, ...], key: str) -> None:
    for i, text in enumerate(texts):
        try:
            network(text)
        except ValueError as exc:
            raise ConfigError(
                f"{key}[{i}]: {text!r} is no address or network; write 10.0.0.0/8 or ::1",
                param=f"{key}[{i}]",
            ) from exc


def _check_shadows(shadow: ShadowConfig) -> None:
    made: list[Policy] = []
    for i, choice in enumerate(shadow.policies):
        key = f"shadow.policies[{i}]"
        try:
            policy = create(choice.name, choice.params)
        except ValueError as exc:
            raise ConfigError(f"{key}: {exc}", param=key) from exc
        if policy in made:
            raise ConfigError(f"{key}: is shadow.policies[{made.index(policy)}], too", param=key)
        made.append(policy)


def _check_experiments(config: Config) -> None:
    """Refuse experiments that are wrong; replicas of arms are known if no others may come."""
    key = "experiment.definitions"
    check_all(config.experiment.definitions, key)
    if config.replicas and not (config.redis.is_configured or config.admin.allow_empty):
        known = [(r.name or f"r{i + 1}", r.url.rstrip("/")) for i, r in enumerate(config.replicas)]
        for i, experiment in enumerate(config.experiment.definitions):
            check_replicas(experiment, known, f"{key}[{i}].")


def _check_redis(redis: RedisConfig) -> None:
    if redis.url is not None:
        _check_redis_url(redis.url)
    for sentinel in redis.sentinels:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^\s:/@]+):\d{1,5}", sentinel):
            raise ConfigError(
                f"redis.sentinels: {sentinel!r} is not HOST:PORT", param="redis.sentinels"
            )
    if bool(redis.sentinels) != (redis.sentinel_service is not None):
        raise ConfigError(
            "redis.sentinels and redis.sentinel_service need each other",
            param="redis.sentinel_service",
        )


def _check_redis_url(text: str) -> None:
    """Refuse what names no Redis; never repeat a password that is in it."""
    key = "redis.url"
    try:
        url = urlsplit(text)
        has_user, host, _ = "@" in url.netloc, url.hostname, url.port
    except ValueError:
        has_user, host, url = "@" in text, None, urlsplit("")
    if has_user or "password=" in url.query:
        raise ConfigError(
            f"{key}: no user or password allowed here; put the password into "
            f"{REDIS_PASSWORD} or the file redis.password_file names, the user into redis.username",
            param=key,
        )
    if url.scheme == "unix":
        query = re.fullmatch(r"(db=\d+)?", url.query)
        is_right = len(url.path) > 1 and not host and query is not None
    else:
        path = re.fullmatch(r"/?\d*", url.path)
        is_scheme = url.scheme in ("redis", "rediss")
        is_right = is_scheme and bool(host) and not url.query and path is not None
    if not is_right or url.fragment:
        raise ConfigError(
            f"{key}: {text!r} is not redis://HOST:PORT/DB, rediss://HOST:PORT/DB or "
            "unix://PATH?db=DB",
            param=key,
        )


def check_replica(replica: ReplicaConfig, key: str = "") -> None:
    """Refuse a replica that cannot be one, wherever it was named; `key` goes before its fields.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    _check_url(replica.url, f"{key}url")
    name = replica.name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(
            f"{key}name: {name!r} may hold letters, digits, '.', '_' and '-' (64 at most)",
            param=f"{key}name",
        )
    if name == "pool":
        raise ConfigError(f"{key}name: 'pool' means the shared pool", param=f"{key}name")
    if replica.replay and len(replica.replay) != len(replica.events):
        raise ConfigError(
            f"{key}replay: name one endpoint per entry of {key}events, or none",
            param=f"{key}replay",
        )
    _check_endpoints(replica.events, f"{key}events")
    _check_endpoints(replica.replay, f"{key}replay")


def _check_url(text: str, key: str) -> None:
    """Refuse what is no base URL; never repeat a password that is in it."""
    try:
        url = urlsplit(text)
        host, has_user, _ = url.hostname, "@" in url.netloc, url.port
    except ValueError:  # a port that is no number, half an IPv6 address
        host, has_user, url = None, "@" in text, urlsplit("")
    if has_user:
        raise ConfigError(
            f"{key}: no user or password allowed; clients' Authorization headers go through",
            param=key,
        )
    if url.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{key}: {text!r} is not a base URL; write http://HOST:PORT", param=key)
    if url.query or url.fragment:
        raise ConfigError(f"{key}: no query or fragment allowed", param=key)


def _check_endpoints(endpoints: tuple[str, ...], key: str) -> None:
    for endpoint in endpoints:
        if not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}|ipc://\S+", endpoint):
            raise ConfigError(
                f"{key}: {endpoint!r} is not tcp://HOST:PORT or ipc://PATH", param=key
            )


def read_yaml(file: Path, known: type[Struct] = Config) -> dict[str, Any]:
    """Read a file whose top level is a mapping.

    Raises:
        ConfigError: it cannot be read, or is none such.
    """
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: not UTF-8, or no such date
        raise ConfigError(f"{file}: not YAML: {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{file}: nested too deep") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: the top level must be a mapping of {_known(known)}")
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: must be a mapping", param=key)
        tree = node
    tree[path[-1]] = value


def _from_text(option: Option, text: str) -> Any:
    """Read an environment variable: lists are comma-separated, mappings NAME=VALUE pairs."""
    if option.kind is not None:
        return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return pairs(option, parts) if option.mapping else parts


def pairs(option: Option, parts: list[str]) -> dict[str, Any]:
    """Split NAME=VALUE pairs; numbers become numbers."""
    result: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ConfigError(f"--{option.flag}: {part!r} is not NAME=VALUE", param=option.flag)
        try:
            result[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            result[name] = value
    return result


def _scalar(base: Any) -> type:
    inner = [a for a in get_args(base) if a is not type(None)]
    if get_origin(base) is Annotated:
        return _scalar(get_args(base)[0])
    if inner:
        return _scalar(inner[0])
    return base if base in (bool, int, float) else str


def _known(section: type[Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(section))


def explained(message: str, root: type[Struct] = Config) -> ConfigError:
    """Turn msgspec's message into one that names the key and what is allowed there."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".").replace("[...]", "[]")
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown is None:
        return ConfigError(f"{path or 'configuration'}: {text}", param=path or None)
    section: Any = root
    for step in re.findall(r"[a-z_]+", path):
        hint = get_type_hints(section)[step]
        section = next((a for a in get_args(hint) if isinstance(a, type)), hint)
    allowed = [field.name for field in msgspec.structs.fields(section)]
    key = f"{path}.{unknown[1]}" if path else unknown[1]
    near = difflib.get_close_matches(unknown[1], allowed, n=1)
    hint_text = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(
        f"unknown key {key!r}: {hint_text}Known here: {', '.join(allowed)}", param=key
    )
