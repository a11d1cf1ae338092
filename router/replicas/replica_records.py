"""Replicas as records that routers share, and the checks of replicas that are added at runtime."""

from __future__ import annotations

from router.base.errors import ConfigError, ReplicaConflict
from router.base.messages import ReplicaRecord
from router.config import ReplicaConfig
from router.config.hosts import HostRules

_SHARED = ("url", "events", "replay", "role", "transfer", "hardware", "weight", "eagle", "pool",
           "bootstrap", "cost_per_hour")  # fmt: skip
"""What a record says of a replica."""


def record_of(replica: ReplicaConfig) -> ReplicaRecord:
    """Write a replica as a record without orders."""
    return ReplicaRecord(**{field: getattr(replica, field) for field in _SHARED})


def replica_of(identity: str, record: ReplicaRecord) -> ReplicaConfig:
    """Read a replica from a record; a name is an identity that is no URL."""
    name = None if "://" in identity else identity
    return ReplicaConfig(name=name, **{field: getattr(record, field) for field in _SHARED})


def check_hosts(replica: ReplicaConfig, hosts: HostRules) -> None:
    """Refuse a replica with an address where none may be added.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    for field, urls in replica.addresses.items():
        host = hosts.refused(urls)
        if host is not None:
            raise ConfigError(
                f"{field}: {host!r} is not in admin.replica_hosts "
                f"({', '.join(hosts.patterns) or 'empty'})",
                param=field,
            )


def check_places(replica: ReplicaConfig, name: str, other: ReplicaConfig) -> None:
    """Refuse a replica with an address or event endpoint of another one.

    Raises:
        ReplicaConflict: the message names the field and the other replica.
    """
    taken = set(other.places.values())
    for field, place in replica.places.items():
        if place in taken:
            raise ReplicaConflict(
                f"{field}: {place} is an address of {name!r}; each engine has ports of its own",
                param=field,
            )
