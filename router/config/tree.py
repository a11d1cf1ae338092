"""The tree of all sections, and each of its leaves as an option."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from router.config.discovery import DiscoveryConfig
from router.config.experiments import Experiment
from router.config.observers import ObserversConfig, TracingConfig
from router.config.ports import AdminConfig, LimitsConfig, ListenConfig, TenantsConfig
from router.config.prefill import PrefillConfig
from router.config.redis import RedisConfig
from router.config.replicas import (
    EngineConfig,
    EventsConfig,
    ForwardConfig,
    HashConfig,
    HealthConfig,
    MooncakeConfig,
    ReplicaConfig,
)
from router.config.routing import (
    EarlyConfig,
    IndexConfig,
    ModelsConfig,
    PolicyConfig,
    QueueConfig,
    SessionConfig,
    TokensConfig,
)


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="log level", extra={"flag": "log-level"}),
    ] = "info"
    json: Annotated[bool, Meta(description="log JSON lines", extra={"flag": "log-json"})] = False
    decisions: Annotated[
        Path | None,
        Meta(
            description="file for decision records (JSON lines)",
            extra={"flag": "decision-log", "metavar": "FILE"},
        ),
    ] = None


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: Annotated[
        tuple[ReplicaConfig, ...],
        Meta(
            description="base URL of a vLLM server, with or without /v1; repeatable",
            extra={"flag": "replica", "metavar": "URL"},
        ),
    ] = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    listen: ListenConfig = ListenConfig()
    admin: AdminConfig = AdminConfig()
    policy: PolicyConfig = PolicyConfig()
    queue: QueueConfig = QueueConfig()
    early: EarlyConfig = EarlyConfig()
    models: ModelsConfig = ModelsConfig()
    tokens: TokensConfig = TokensConfig()
    hash: HashConfig = HashConfig()
    events: EventsConfig = EventsConfig()
    engine: EngineConfig = EngineConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    prefill: PrefillConfig = PrefillConfig()
    limits: LimitsConfig = LimitsConfig()
    forward: ForwardConfig = ForwardConfig()
    health: HealthConfig = HealthConfig()
    session: SessionConfig = SessionConfig()
    tenants: TenantsConfig = TenantsConfig()
    redis: RedisConfig = RedisConfig()
    index: IndexConfig = IndexConfig()
    experiment: Annotated[
        Experiment | None,
        Meta(
            description="an experiment on live traffic; the table below has its keys",
            extra={"only_in_file": True},
        ),
    ] = None
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    observers: ObserversConfig = ObserversConfig()

    @property
    def may_grow(self) -> bool:
        """Whether replicas may come that are not configured."""
        return self.redis.is_configured or self.admin.allow_empty or self.discovery.is_configured


SECTIONS: Final = {
    "replicas": "Replicas",
    "discovery": "Discovery of replicas",
    "listen": "Public port",
    "admin": "Admin port",
    "policy": "Routing policy",
    "queue": "Queue",
    "early": "Next prompts, early",
    "models": "Names of models",
    "tokens": "Tokenizers",
    "hash": "Block hashes",
    "events": "KV events",
    "engine": "Engines: API key, cost",
    "mooncake": "Mooncake pool",
    "prefill": "Prefill and decode on different replicas",
    "limits": "Limits for clients",
    "forward": "Forwarding, retries and timeouts",
    "health": "Health probes",
    "session": "Sessions",
    "tenants": "Tenants",
    "redis": "Redis, for several routers",
    "index": "Index",
    "experiment": "Experiments",
    "log": "Logs and decision records",
    "tracing": "OpenTelemetry traces",
    "observers": "Observers of your own",
}
"""What each section is about, as a heading."""


class Option(NamedTuple):
    """One leaf of the tree as the command line shows it."""

    path: tuple[str, ...]  # ("listen", "port")
    flag: str | None  # "port"; None: `--set` has its place
    metavar: str  # of the flag
    variable: str  # "WARMROUTE_LISTEN_PORT"
    description: str
    default: Any
    kind: type | None  # bool, int, float, str; None: a list
    mapping: bool
    repeats: bool  # the flag may be given several times
    choices: tuple[str, ...]  # the allowed values; empty: not a closed set
    is_file: bool
    only_in_file: bool  # no text has its value: a variable is refused

    @property
    def key(self) -> str:
        """Its name in files."""
        return ".".join(self.path)

    @property
    def argument(self) -> str:
        """What it is called on the command line."""
        return f"--set {self.key}" if self.flag is None else f"--{self.flag}"


@cache
def options() -> tuple[Option, ...]:
    """List every option of the tree, in order."""
    return tuple(_options(Config, ()))


def _options(section: type[Struct], prefix: tuple[str, ...]) -> Iterator[Option]:
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        path = (*prefix, field.name)
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from _options(hint, path)
            continue
        metas = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)]
        described = next(m for m in reversed(metas) if m.description)
        base = get_args(hint)[0] if metas else hint
        extra: dict[str, Any] = described.extra or {}
        is_list = get_origin(base) in (tuple, dict)
        yield Option(
            path=path,
            flag=extra.get("flag"),
            metavar=extra.get("metavar", ""),
            variable="_".join(("WARMROUTE", *path)).upper(),
            description=described.description or "",
            default=None if field.default is msgspec.NODEFAULT else field.default,
            kind=None if is_list else _scalar(base),
            mapping=get_origin(base) is dict,
            repeats=is_list or extra.get("joined", False),
            choices=_choices(base),
            is_file=Path in (base, *get_args(base)),
            only_in_file=extra.get("only_in_file", False),
        )


def _choices(base: Any) -> tuple[str, ...]:
    """Return the values of a Literal, or of one that may be None."""
    literals = (each for each in (base, *get_args(base)) if get_origin(each) is Literal)
    return tuple(value for each in literals for value in get_args(each))


def _scalar(base: Any) -> type:
    inner = [a for a in get_args(base) if a is not type(None)]
    if get_origin(base) is Annotated:
        return _scalar(get_args(base)[0])
    if inner:
        return _scalar(inner[0])
    return base if base in (bool, int, float) else str
