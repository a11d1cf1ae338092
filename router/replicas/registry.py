"""The registry: which replicas there should be: configured, found by sources, ordered.

What must live here: names, identities, what operators ordered here or on another router, what
sources found. What must not: whether a replica answers (router.discovery.watches), its load and
health (fleet), any I/O.

A replica's *identity* is what routers call it among themselves: the name that it was given, else
its base URL. Its local name may differ: each router gives out `r1`, `r2` for itself.

An order (add, drain, remove) leaves a record, which is shared with the other routers. `apply` takes
their records in. A source (router.discovery.sources) names whole sets. Each router has its own
sources, so what they find is no order and leaves no record.

Entries follow from these three inputs, in this order; there is one replica at an address:

1. Each configured replica, unless a record of it says that it is removed.
2. Each replica that a record adds. A record about a configured identity at another address is
   ignored.
3. Each replica that a source found, of several sources the first. Not, if its identity is taken, or
   its record says that it is removed. If it is not ready, it is not entered yet, or not offered.

A record applies to the entry of its identity, else to the one at its address that has no record.
An entry that follows from no input any more is *leaving*, until it is idle. If its address belongs
to another identity now, it is another replica, and the old entry goes at once.

What was ordered here and is not stored yet is newer than what is read from the store. A record that
is missing there changes nothing: a store that lost its data removes no replica.

Configured replicas may be sent the engines' own `--api-key`. A replica that the admin API or
another router added may only if its host is in `engine.key_hosts`: adding a replica must not reveal
the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Self
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from router.base.addresses import place_of
from router.base.errors import ConfigError, ReplicaConflict, UnknownReplica
from router.base.messages import Evacuation, ReplicaRecord
from router.config import AdminConfig, Config, ReplicaConfig, check_pool, check_replica
from router.config.hosts import HostRules
from router.replicas.replica import Entry, Found


class EngineKey:
    """A key and the base URLs that may have it.

    Args:
        key: None: there is none.
        urls: Base URLs of the configured replicas.
        hosts: Hosts of other replicas that may also have it.
    """

    __slots__ = ("_hosts", "_key", "_urls")

    def __init__(self, key: str | None, urls: Iterable[str], hosts: HostRules) -> None:
        self._key = key
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._hosts = hosts

    @classmethod
    def of(cls, config: Config, key: str | None) -> Self:
        """Build it from the replicas and hosts of a configuration."""
        return cls(key, (r.url for r in config.replicas), HostRules(config.engine.key_hosts))

    def configure(self, config: Config) -> None:
        """Apply another list of configured replicas."""
        self._urls = frozenset(replica.url.rstrip("/") for replica in config.replicas)

    def use(self, key: str) -> None:
        """Send another key from the next request on."""
        self._key = key

    def headers(self, url: str) -> Mapping[str, str]:
        """Return the header that authorizes at the replica with base URL `url`; {}: none."""
        if self._key is None:
            return {}
        is_known = url.rstrip("/") in self._urls or self._hosts.refused([url]) is None
        return {"Authorization": f"Bearer {self._key}"} if is_known else {}


NO_KEY = EngineKey(None, (), HostRules(()))


class _Wanted(Struct, frozen=True, kw_only=True):
    """A replica that follows from the inputs."""

    replica: ReplicaConfig
    draining: bool = False
    evacuation: Evacuation | None = None
    source: str | None = None
    is_ready: bool = True


_ANY_ORDINARY_HOST = HostRules(AdminConfig().replica_hosts)
_NO_ORDER = ReplicaRecord(url="")
_SHARED = ("url", "events", "replay", "role", "transfer", "hardware", "weight", "eagle", "pool",
           "bootstrap", "cost_per_hour")  # fmt: skip
"""What a record says of a replica."""


class Registry:
    """Replicas by name, those configured first, then as they were added.

    Args:
        hosts: Where replicas that are not configured may be.
        pools: Names of the Mooncake pools that they may be in; "" is the only one.
    """

    __slots__ = ("_configured", "_entries", "_found", "_hosts", "_names", "_numbers", "_pools",
                 "_records", "not_entered", "unsaved")  # fmt: skip

    def __init__(
        self,
        configured: Sequence[ReplicaConfig] = (),
        *,
        hosts: HostRules = _ANY_ORDINARY_HOST,
        pools: Sequence[str] = (),
    ) -> None:
        self._hosts = hosts
        self._pools = pools
        self.unsaved: dict[str, ReplicaRecord] = {}  # ordered here, not known to be stored
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, str] = {}  # identity -> name, also of those that left
        self._records: dict[str, ReplicaRecord] = {}
        self._found: dict[str, dict[str, Found]] = {}  # source -> address -> what it found
        self.not_entered: dict[str, str] = {}  # address of what sources found -> why
        self._numbers = count(len(configured) + 1)
        self._configured = {replica.identity: replica for replica in configured}
        for number, replica in enumerate(configured, 1):
            self._names[replica.identity] = replica.name or f"r{number}"
        self._reconcile()

    # -- questions ---------------------------------------------------------------------------

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All replicas that should be there, those that are leaving included."""
        return tuple(self._entries.values())

    @property
    def records(self) -> Mapping[str, ReplicaRecord]:
        """All orders by identity, given here or elsewhere: for a store that lost them."""
        return self._records

    def find(self, name: str) -> Entry | None:
        """Find a replica by its local name."""
        return self._entries.get(name)

    def of_identity(self, identity: str) -> Entry | None:
        """Find a replica by what routers call it."""
        entry = self._entries.get(self._names.get(identity, ""))
        return entry if entry is not None and entry.identity == identity else None

    # -- orders given here -------------------------------------------------------------------

    def add(self, replica: ReplicaConfig) -> tuple[Entry, bool]:
        """Add a replica, or keep one that is there (or leaving); return it and whether it is new.

        Raises:
            ConfigError: it cannot be one, or may not be added where it is.
            ReplicaConflict: its name or its address is another's.
        """
        self._check(replica)
        entry = self._match(replica)
        is_new = entry is None or entry.leaving
        identity = entry.identity if entry is not None else replica.identity
        if is_new:
            added = self._configured.get(identity, replica) if entry is None else entry.replica
            self._order(identity, _record_of(added))
        found = self.of_identity(identity)
        assert found is not None
        return found, is_new

    def drain(self, name: str, *, draining: bool, evacuation: Evacuation | None = None) -> Entry:
        """Order that a replica gets no new requests, or gets them again.

        Raises:
            UnknownReplica: there is none of that name.
        """
        known = self._known(name)
        self._entries[name] = replace(known, draining=draining, evacuation=evacuation)
        self._order(known.identity, _order_of(self._entries[name]))
        return self._entries[name]

    def remove(self, name: str) -> Entry:
        """Order that a replica goes: it is leaving from now on, until it is idle.

        Raises:
            UnknownReplica: there is none of that name.
            ReplicaConflict: a source has found it, and would again.
        """
        known = self._known(name)
        if known.source is not None and not known.leaving:
            raise ReplicaConflict(
                f"{name!r} is found by {known.source}: drain it, or take it out there", param="name"
            )
        if known.source is None:
            self._order(known.identity, _order_of(replace(known, leaving=True)))
        return self._entries[name]

    def forget(self, name: str) -> None:
        """Remove the entry of a replica that was leaving; the record of its removal stays."""
        entry = self._entries.pop(name, None)
        if entry is not None and entry.source is not None and entry.identity not in self._records:
            self._names.pop(entry.identity, None)  # pods come under new names for ever

    def saved(self, identity: str, record: ReplicaRecord) -> None:
        """Record that a record is stored; a newer one of that identity still is not."""
        if self.unsaved.get(identity) == record:
            del self.unsaved[identity]

    # -- other inputs ------------------------------------------------------------------------

    def configure(self, replicas: Sequence[ReplicaConfig]) -> tuple[str, ...]:
        """Apply another list of configured replicas; return the names that changed.

        Those that it no longer lists are leaving, without a record: each router has a configuration
        of its own.

        Raises:
            ConfigError: a name in it is another replica's; nothing changed.
        """
        wanted = {replica.identity: replica for replica in replicas}
        for i, replica in enumerate(replicas):
            self._check_name(f"replicas[{i}].name", replica, wanted)
        for identity in self._configured.keys() - wanted.keys():
            if not self._records.get(identity, _NO_ORDER).removed:
                self._records.pop(identity, None)
        self._configured = wanted
        return self._reconcile()

    def follow(self, source: str, found: Sequence[Found]) -> tuple[str, ...]:
        """Apply the whole set that a source found; return the names that changed. Idempotent.

        Each is a replica where one may be found.
        """
        self._found[source] = {f.replica.url: f for f in found}
        return self._reconcile()

    def apply(self, records: Mapping[str, ReplicaRecord]) -> tuple[str, ...]:
        """Follow the records of the store; return the names that changed. Idempotent.

        Records that are refused are left out.
        """
        self._records |= {
            identity: record
            for identity, record in records.items()
            if identity not in self.unsaved and self.refused(identity, record) is None
        }
        return self._reconcile()

    def refused(self, identity: str, record: ReplicaRecord) -> str | None:
        """Return why a record is not followed; None: it is.

        Writers of the store may add replicas on allowed hosts, but not break names.
        """
        replica = _replica_of(identity, record)
        try:
            self._check(replica, is_found=record.discovered)
        except ConfigError as exc:
            return exc.message
        if replica.name is None and identity != replica.url:
            return f"{identity!r} is neither a name nor the replica's address"
        return None

    # -- from inputs to entries --------------------------------------------------------------

    def _reconcile(self) -> tuple[str, ...]:
        """Make the entries follow from the inputs; return the names that changed."""
        before = dict(self._entries)
        wanted = self._wanted()
        places = {place_of(each.replica.url): identity for identity, each in wanted.items()}
        for entry in before.values():
            if entry.identity in wanted:
                continue
            if place_of(entry.replica.url) in places:  # another replica has its address
                del self._entries[entry.name]
            else:
                self._entries[entry.name] = replace(entry, leaving=True)
        for identity, each in wanted.items():
            name = self._name_for(identity, each)
            self._entries[name] = Entry(
                name=name,
                identity=identity,
                replica=each.replica,
                draining=each.draining,
                evacuation=each.evacuation,
                source=each.source,
                is_ready=each.is_ready,
            )
        names = dict.fromkeys([*before, *self._entries])
        return tuple(name for name in names if before.get(name) != self._entries.get(name))

    def _wanted(self) -> dict[str, _Wanted]:
        """Return the replicas that should be there by identity; see the module's charter."""
        wanted: dict[str, _Wanted] = {}
        places: set[str] = set()
        by_place = {place_of(r.url): r for r in self._records.values() if not r.discovered}

        def enter(identity: str, replica: ReplicaConfig, source: str | None, ready: bool) -> bool:
            """Enter a replica; return False if an order says that it is removed."""
            place = place_of(replica.url)
            order = self._records.get(identity)
            if order is None or (source is None and place_of(order.url) != place):
                order = by_place.get(place, _NO_ORDER)
            if order.removed:
                return False
            places.add(place)
            wanted[identity] = _Wanted(
                replica=replica,
                draining=order.draining,
                evacuation=order.evacuation if order.draining else None,
                source=source,
                is_ready=ready,
            )
            return True

        for identity, replica in self._configured.items():
            enter(identity, replica, None, True)
        for identity, record in self._records.items():
            is_known = identity in self._configured or place_of(record.url) in places
            if not (is_known or record.discovered):
                enter(identity, _replica_of(identity, record), None, True)
        self.not_entered = {}
        for source, found in self._found.items():
            for url, one in found.items():
                identity = one.replica.identity
                if place_of(url) in places:
                    continue
                namesake = self._configured.get(identity, one.replica)
                if identity in wanted or namesake.url != one.replica.url:
                    self.not_entered[url] = f"the name {identity!r} is another replica's"
                elif one.is_ready or self.of_identity(identity) is not None:
                    if not enter(identity, one.replica, source, one.is_ready):
                        reason = f"{identity!r} was removed by an order; adding it takes that back"
                        self.not_entered[url] = reason
        return wanted

    def _name_for(self, identity: str, wanted: _Wanted) -> str:
        """Return the local name: the one it has or had, the one given, else a new one."""
        replica = wanted.replica
        had = self._names.get(identity)
        if had is None or not self._is_free(had, identity):
            if replica.name is not None and self._is_free(replica.name, identity):
                had = replica.name
            elif wanted.source is not None and replica.name is None:
                had = self._name_at(replica.url)
            else:
                taken = {*self._entries, *self._names.values()}
                numbered = (f"r{number}" for number in self._numbers)
                had = next(name for name in numbered if name not in taken)
            self._names[identity] = had
        return had

    def _is_free(self, name: str, identity: str) -> bool:
        entry = self._entries.get(name)
        return entry is None or entry.identity == identity

    def _name_at(self, url: str) -> str:
        """Return a name for what was found at an address: HOST-PORT, as all routers call it."""
        base = re.sub(r"[^A-Za-z0-9._-]", "-", urlsplit(url).netloc.strip("[]"))[:60]
        names = chain([base], (f"{base}-{number}" for number in count(2)))
        return next(name for name in names if name not in self._entries)

    def _order(self, identity: str, record: ReplicaRecord) -> None:
        self._records[identity] = self.unsaved[identity] = record
        self._reconcile()

    # -- checks ------------------------------------------------------------------------------

    def _check(self, replica: ReplicaConfig, *, is_found: bool = False) -> None:
        """Refuse what cannot be a replica, or connects to where none may be added.

        A replica that sources find is added by them, not here.

        Raises:
            ConfigError: the message and `param` name the field.
        """
        check_replica(replica)
        check_pool(replica, self._pools)
        if not is_found and replica.url not in {known.url for known in self._configured.values()}:
            _check_hosts(replica, self._hosts)

    def _check_name(
        self, key: str, replica: ReplicaConfig, wanted: Mapping[str, ReplicaConfig]
    ) -> None:
        entry = self._entries.get(replica.name or "")
        if entry is None or entry.replica.url == replica.url:
            return
        goes = entry.identity in self._configured and entry.identity not in wanted
        moves = entry.identity == replica.identity and entry.identity in self._configured
        if not (goes or moves):
            raise ConfigError(
                f"{key}: {replica.name!r} is taken, by {entry.replica.url}", param=key
            )

    def _known(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(self._entries) or "none yet"
            raise UnknownReplica(f"no replica {name!r}; known: {known}", param="name")
        return entry

    def _match(self, replica: ReplicaConfig) -> Entry | None:
        """Find the entry that a replica to add is; None if it is a new one."""
        place = place_of(replica.url)
        at = next((e for e in self.entries if place_of(e.replica.url) == place), None)
        for other in self._entries.values():
            if other is not at and not other.leaving:
                _check_places(replica, other.name, other.replica)
        named = self._entries.get(replica.name) if replica.name else None
        if at is not None and replica.name and at.name != replica.name:
            raise ReplicaConflict(f"{replica.url} is there already, as {at.name!r}", param="url")
        if named is not None and named is not at:
            raise ReplicaConflict(
                f"the name {replica.name!r} is taken, by {named.replica.url}", param="name"
            )
        configured = self._configured.get(replica.name or "", replica)
        if configured.url != replica.url:
            raise ReplicaConflict(
                f"{replica.name!r} is the configured name of {configured.url}", param="name"
            )
        return at


def _order_of(entry: Entry) -> ReplicaRecord:
    """Write down what is ordered about an entry."""
    return replace(
        _record_of(entry.replica),
        draining=entry.draining,
        evacuation=entry.evacuation,
        removed=entry.leaving,
        discovered=entry.source is not None,
    )


def _record_of(replica: ReplicaConfig) -> ReplicaRecord:
    """Write a replica as a record without orders."""
    return ReplicaRecord(**{field: getattr(replica, field) for field in _SHARED})


def _replica_of(identity: str, record: ReplicaRecord) -> ReplicaConfig:
    """Read a replica from a record; a name is an identity that is no URL."""
    name = None if "://" in identity else identity
    return ReplicaConfig(name=name, **{field: getattr(record, field) for field in _SHARED})


def _check_hosts(replica: ReplicaConfig, hosts: HostRules) -> None:
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


def _check_places(replica: ReplicaConfig, name: str, other: ReplicaConfig) -> None:
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
