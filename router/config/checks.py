"""Checks of what types cannot say: addresses, names used twice, settings that need each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import date
from typing import Final
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from msgspec.structs import fields

from policies.naming import split
from policies.registry import POLICIES, create
from router.api.routes import check_pattern
from router.api.sessions import network
from router.base.addresses import unbracketed
from router.base.errors import ConfigError, ConfigErrors
from router.config.discovery import check_discovery
from router.config.experiments import check as check_experiment
from router.config.hosts import HostRules
from router.config.observers import check_tracing
from router.config.ports import AdminConfig
from router.config.prefill import check_roles
from router.config.redis import check_redis
from router.config.replicas import ReplicaConfig, pool_of
from router.config.routing import PolicyConfig
from router.config.tree import Config

_OWN_HOSTS = ("127.0.0.1", "::1", "localhost")

_LAYOUT_FIELD = re.compile(
    r"((tp_rank|pp_rank|group|store_tp|store_pp):|pcp|dcp)[0-9]+(-[0-9]+)?"
    r"|(?!(tp_rank|pp_rank|group|store_tp|store_pp):)[^@\s]+"
)
"""A field of a pool key: ranks and sizes are numbers, models and prefixes are words."""


def errors_of(config: Config, left_out: Collection[str] = ()) -> list[ConfigError]:
    """List URLs without a host, names used twice, settings that lack what they need.

    Args:
        left_out: Sections with errors already found: what reads them is not checked.
    """
    errors: list[ConfigError] = []
    for reads, check in _CHECKS:
        if {*reads}.isdisjoint(left_out):
            try:
                check(config)
            except ConfigErrors as exc:
                errors += exc.errors
            except ConfigError as exc:
                errors.append(exc)
    return errors


def check_pool(replica: ReplicaConfig, pools: Sequence[str], key: str = "") -> None:
    """Refuse a replica of a pool that there is not; `key` goes before its field.

    Args:
        pools: Names of those there are; "" is the only one.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    if isinstance(replica.pool, str) and (replica.pool not in pools or not replica.pool):
        named = [name for name in pools if name]
        allowed = f"{', '.join(named)}, or false" if named else "true or false: no pool has a name"
        raise ConfigError(
            f"{key}pool: unknown pool {replica.pool!r}; write {allowed}", param=f"{key}pool"
        )


def _check_each_replica(config: Config) -> None:
    """Refuse every replica that cannot be one, then what they have in common."""
    errors: list[ConfigError] = []
    for i, replica in enumerate(config.replicas):
        try:
            check_replica(replica, f"replicas[{i}].")
        except ConfigError as exc:
            errors.append(exc)
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    check_replica_list(config.replicas)


def _check_admin(admin: AdminConfig) -> None:
    if admin.open and unbracketed(admin.host) not in _OWN_HOSTS:
        raise ConfigError(
            "admin.open: not allowed if other hosts can reach the port (admin.host: "
            f"{admin.host!r})",
            param="admin.open",
        )


def _check_shared(config: Config) -> None:
    if not config.listen.shared:
        return
    key = "listen.shared"
    if sys.platform != "linux":
        raise ConfigError(f"{key}: needs Linux (SO_REUSEPORT)", param=key)
    if not config.redis.is_configured:
        raise ConfigError(
            f"{key}: needs redis.url (--redis): without it a router does not see what the others "
            "on its port have in flight",
            param=key,
        )


def _check_ports(config: Config) -> None:
    listen, admin = config.listen, config.admin
    if listen.port and (listen.host, listen.port) == (admin.host, admin.port):
        key = "admin.port"
        raise ConfigError(f"{key}: {admin.port} is listen.port, too; set another one", param=key)


def _check_routes(patterns: Sequence[str]) -> None:
    for i, pattern in enumerate(patterns):
        if wrong := check_pattern(pattern):
            raise ConfigError(f"forward.routes[{i}]: {wrong}", param=f"forward.routes[{i}]")


def _check_index(config: Config) -> None:
    if config.index.mode == "redis" and not config.redis.is_configured:
        raise ConfigError("index.mode: redis needs redis.url (--redis)", param="index.mode")


def _check_pools(config: Config) -> None:
    """Refuse pools that are one, pools without replicas, and replicas of no pool."""
    mooncake = config.mooncake
    if mooncake.master is not None:
        for url in mooncake.master.split(","):
            _check_url(url.strip(), "mooncake.master")
        if mooncake.pools:
            raise ConfigError(
                "mooncake.master names one pool, mooncake.pools several: use one of them",
                param="mooncake.master",
            )
    first_of: dict[str, str] = {}  # a pool's name, or a master's URL -> its key
    for i, pool in enumerate(mooncake.pools):
        key = f"mooncake.pools[{i}]"
        _refuse_twice(first_of, pool.name, f"{key}.name")
        for url in map(str.strip, pool.master.split(",")):
            _check_url(url, f"{key}.master")
            _refuse_twice(first_of, url.rstrip("/"), f"{key}.master")
    names = mooncake.names
    for i, replica in enumerate(config.replicas):
        check_pool(replica, names, f"replicas[{i}].")
        if len(names) > 1 and replica.pool in (None, True):
            raise ConfigError(
                f"replicas[{i}].pool: required, because there are several pools; write "
                f"{', '.join(names)}, or false",
                param=f"replicas[{i}].pool",
            )
    if config.may_grow:
        return
    used = {pool_of(replica, names) for replica in config.replicas}
    for i, name in enumerate(names if mooncake.pools and config.replicas else ()):
        if name not in used:
            raise ConfigError(
                f"mooncake.pools[{i}].name: no replica is in {name!r}; write pool: {name} for "
                "its replicas",
                param=f"mooncake.pools[{i}].name",
            )


def _refuse_twice(first_of: dict[str, str], value: str, key: str) -> None:
    first = first_of.setdefault(value, key)
    if first != key:
        raise ConfigError(f"{key}: {value!r} is already {first}", param=key)


def check_replica_list(replicas: Sequence[ReplicaConfig]) -> None:
    """Refuse a list in which one cannot be a replica, or two have one name or one address.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    names: set[str] = set()
    first_of: dict[str, str] = {}  # where a server listens -> its key
    for i, replica in enumerate(replicas):
        key = f"replicas[{i}]"
        check_replica(replica, f"{key}.")
        name = replica.name or f"r{i + 1}"
        if name in names:
            raise ConfigError(f"{key}.name: {name!r} is used twice", param=f"{key}.name")
        names.add(name)
        for field, place in replica.places.items():
            first = first_of.setdefault(place, f"{key}.{field}")
            if first != f"{key}.{field}":
                raise ConfigError(
                    f"{key}.{field}: is already {first} ({place}); write each replica once, with "
                    "the ports of its own engine",
                    param=f"{key}.{field}",
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
            f"{key}name: {name!r} must consist of letters, digits, '.', '_' and '-' (at most 64)",
            param=f"{key}name",
        )
    if name == "pool":
        raise ConfigError(f"{key}name: 'pool' is reserved for the shared pool", param=f"{key}name")
    if replica.replay and len(replica.replay) != len(replica.events):
        raise ConfigError(
            f"{key}replay: give one endpoint per entry of {key}events, or none",
            param=f"{key}replay",
        )
    layout = [] if replica.pool_layout is None else replica.pool_layout.split("@")
    for field in layout:
        if not _LAYOUT_FIELD.fullmatch(field):
            raise ConfigError(
                f"{key}pool_layout: {field!r} is not a layout field; write e.g. tp_rank:0-3, or "
                "copy key_pattern from /admin/pool",
                param=f"{key}pool_layout",
            )
    if replica.bootstrap is not None:
        _check_url(replica.bootstrap, f"{key}bootstrap")
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
            f"{key}: no user or password allowed; clients' Authorization headers are passed "
            "through",
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
                f"{key}[{i}]: {text!r} is not an address or network; write 10.0.0.0/8 or ::1",
                param=f"{key}[{i}]",
            ) from exc


def _check_time_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as exc:
        raise ConfigError(
            f"tokens.time_zone: {name!r} is not a time zone; write a name such as Europe/Berlin",
            param="tokens.time_zone",
        ) from exc


def _check_dates(dates: dict[str, str]) -> None:
    for model, text in dates.items():
        key = f"tokens.start_dates.{model}"
        try:
            date.fromisoformat(text)
        except ValueError as exc:
            raise ConfigError(f"{key}: {text!r} is not YYYY-MM-DD", param=key) from exc


def _check_policy(choice: PolicyConfig) -> None:
    if ":" in choice.name:
        raise ConfigError(f"policy: {_with_params(choice.name)}", param="policy.name")
    try:
        create(choice.name, choice.params)
    except ValueError as exc:
        known = POLICIES.get(choice.name)
        names = [field.name for field in fields(known)] if known is not None else []
        wrong = next((f".{name}" for name in choice.params if name not in names), "")
        key = f"policy.params{wrong}" if known is not None else "policy.name"
        raise ConfigError(f"policy: {exc}", param=key) from exc


def _with_params(text: str) -> str:
    """Explain how to write a policy that was given with parameters, and what is wrong with them."""
    try:
        name, params = split(text)
        create(name, params)
    except ValueError as exc:
        return f"{exc}; a parameter is written --policy-param NAME=VALUE"
    flags = " ".join(f"--policy-param {param}={value}" for param, value in params.items())
    pairs = ", ".join(f"{param}: {value}" for param, value in params.items())
    return (
        f"{text!r} has parameters; write --policy {name} {flags}, or in a file policy: "
        f"{{name: {name}, params: {{{pairs}}}}}"
    )


_GROWS: Final = ("redis", "admin", "discovery")  # what `Config.may_grow` reads
_CHECKS: Final[Sequence[tuple[Sequence[str], Callable[[Config], None]]]] = (
    (("replicas",), _check_each_replica),
    (("replicas", "mooncake", *_GROWS), _check_pools),
    (
        ("replicas", "mooncake", "prefill", *_GROWS),
        lambda c: check_roles(c.replicas, c.prefill, c.mooncake.names, may_grow=c.may_grow),
    ),
    (("admin",), lambda c: _check_admin(c.admin)),
    (("listen", "redis"), _check_shared),
    (("listen", "admin"), _check_ports),
    (("forward",), lambda c: _check_routes(c.forward.routes)),
    (("admin",), lambda c: _check_hosts(c.admin.replica_hosts, "admin.replica_hosts")),
    (("discovery",), lambda c: check_discovery(c.discovery)),
    (("discovery",), lambda c: _check_hosts(c.discovery.hosts, "discovery.hosts")),
    (("engine",), lambda c: _check_hosts(c.engine.key_hosts, "engine.key_hosts")),
    (("listen",), lambda c: _check_networks(c.listen.trusted, "listen.trusted")),
    (("forward",), lambda c: _check_networks(c.forward.trusted_proxies, "forward.trusted_proxies")),
    (("redis",), lambda c: check_redis(c.redis)),
    (("index", "redis"), _check_index),
    (("tokens",), lambda c: _check_time_zone(c.tokens.time_zone)),
    (("tokens",), lambda c: _check_dates(c.tokens.start_dates)),
    (("policy",), lambda c: _check_policy(c.policy)),
    (("experiment",), lambda c: check_experiment(c.experiment)),
    (("tracing",), lambda c: check_tracing(c.tracing)),
)
"""The sections that a check reads, and the check."""
