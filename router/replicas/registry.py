"""The registry: which replicas there should be: configured, found by sources, ordered.

What must live here: names, identities, what operators ordered here or on another router, what
sources found. What must not: whether a replica answers (router.discovery.watch), its load and
health (fleet), any I/O.

An order (add, drain, remove) changes the registry at once and leaves a record, to be shared with
the other routers; `apply` takes theirs in. A replica's *identity* is what routers call it among
themselves: the name it was given, else its base URL. Its local name may differ: `r1`, `r2` are
given out by each router for itself. Rules, in this order:

1. A configured replica is as configured: a record about it at another address is ignored.
2. A record meets the entry of its identity, else the one at its address; but one that has a record
   of its own is not met by its address: there is one replica at an address.
3. What was ordered here and is not stored yet is newer than what is read from the store.
4. A record that is gone changes nothing: a store that lost its data removes no replica.

A source (router.discovery.sources) names whole sets; `follow` makes its entries be such a set. Each
router has its own sources, so what they find is no order and leaves no record. Rules, in this
order:

5. One that is configured or was added by an order is left as it is, whatever sources find there.
6. An order that it is drained holds for its identity; an order elsewhere that it is removed, too.
7. Another name at an address is another replica: the one of the old name is forgotten at once. A
   name at another address has moved.
8. One that no source names any more is leaving. One that is named, but not ready, keeps what is
   known of it and gets no requests; if it is new, it is not entered yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from router.addresses import place_of
from router.config import AdminConfig, ReplicaConfig, check_pool, check_replica
from router.config.hosts import HostRules
from router.errors import ConfigError, ReplicaConflict, UnknownReplica
from router.messages import ReplicaRecord


class Found(Struct, frozen=True, kw_only=True):
    """A replica as a source found it."""

    replica: ReplicaConfig
    is_ready: bool = True


class Entry(Struct, frozen=True, kw_only=True):
    """A replica as it should be. One that leaves drains, and is forgotten when it is idle."""

    name: str  # in this router's metrics and headers
    identity: str  # among routers
    replica: ReplicaConfig
    draining: bool = False
    leaving: bool = False
    source: str | None = None  # which found it; None: it is configured, or was added by an order
    is_ready: bool = True  # by the word of its source

    @property
    def is_offered(self) -> bool:
        """Whether it may have new requests."""
        return self.is_ready and not (self.draining or self.leaving)

    def record(self) -> ReplicaRecord:
        """Write down what is ordered about it."""
        return ReplicaRecord(
            url=self.replica.url,
            events=self.replica.events,
            replay=self.replica.replay,
            role=self.replica.role,
            transfer=self.replica.transfer,
            hardware=self.replica.hardware,
            weight=self.replica.weight,
            eagle=self.replica.eagle,
            pool=self.replica.pool,
            bootstrap=self.replica.bootstrap,
            draining=self.draining,
            removed=self.leaving,
            discovered=self.source is not None,
        )


_ANY_ORDINARY_HOST = HostRules(AdminConfig().replica_hosts)


class Registry:
    """Replicas by name, those configured first, then as they were added.

    Args:
        hosts: Where replicas that are not configured may be.
        pools: Names of the Mooncake pools that they may be in; "" is the only one.
    """

    __slots__ = (
        "_configured",
        "_entries",
        "_found",
        "_hosts",
        "_names",
        "_numbers",
        "_pools",
        "_records",
        "not_entered",
        "unsaved",
    )

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
        self._configured: dict[str, ReplicaConfig] = {}
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, str] = {}  # identity -> name, of those that left, too
        self._records: dict[str, ReplicaRecord] = {}
        self._found: dict[str, dict[str, Found]] = {}  # source -> address -> what it found
        self.not_entered: dict[str, str] = {}  # address of what sources found -> why
        self._numbers = count(len(configured) + 1)
        for number, replica in enumerate(configured, 1):
            self._enter(replica, replica.name or f"r{number}")
        self._configured = {entry.identity: entry.replica for entry in self.entries}

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
        return self._entries.get(self._names.get(identity, ""))

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
        if entry is None:
            entry = self._enter(replica)
        elif entry.leaving:
            entry = self._put(replace(entry, leaving=False, draining=False, source=None))
        if is_new:
            self._ordered(entry)
        return entry, is_new

    def drain(self, name: str, *, draining: bool) -> Entry:
        """Order that a replica gets no new requests, or gets them again.

        Raises:
            UnknownReplica: there is none of that name.
        """
        entry = self._put(replace(self._known(name), draining=draining))
        self._ordered(entry)
        return entry

    def remove(self, name: str) -> Entry:
        """Order that a replica goes: it is leaving from now on, until it is forgotten.

        Raises:
            UnknownReplica: there is none of that name.
            ReplicaConflict: a source has found it, and would again.
        """
        known = self._known(name)
        if known.source is not None and not known.leaving:
            raise ReplicaConflict(
                f"{name!r} is found by {known.source}: drain it, or take it out there", param="name"
            )
        entry = self._put(replace(known, leaving=True))
        if known.source is None:
            self._ordered(entry)
        return entry

    def forget(self, name: str) -> None:
        """Let a replica that was leaving go; the record that it was removed stays."""
        entry = self._entries.pop(name, None)
        if entry is not None and entry.source is not None and entry.identity not in self._records:
            self._names.pop(entry.identity, None)  # pods come under new names for ever

    # -- another configuration ---------------------------------------------------------------

    def configure(self, replicas: Sequence[ReplicaConfig]) -> tuple[str, ...]:
        """Take another list of configured replicas; return the names that changed.

        Those that it does not list any more are leaving, without a record: each router has a
        configuration of its own.

        Raises:
            ConfigError: a name in it is another replica's; nothing changed.
        """
        wanted = {replica.identity: replica for replica in replicas}
        for i, replica in enumerate(replicas):
            self._check_name(f"replicas[{i}].name", replica, wanted)
        before = dict(self._entries)
        urls = {replica.url for replica in wanted.values()}
        for identity, replica in self._configured.items():
            entry = self.of_identity(identity)
            if identity in wanted or entry is None:
                continue
            if replica.url in urls:
                del self._entries[entry.name]
            else:
                self._put(replace(entry, leaving=True))
        self._configured = wanted
        for identity, replica in wanted.items():
            self._enter_configured(identity, replica)
        self._reconcile_found()
        return self._changed_since(before)

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

    def _enter_configured(self, identity: str, replica: ReplicaConfig) -> None:
        entry, at = self.of_identity(identity), self._at(replica.url)
        record = self._records.get(identity)
        is_removed = record is not None and record.removed
        if at is not None and at.identity != identity:  # found or added there, by another name
            del self._entries[at.name]
        if entry is None:
            if not is_removed:
                self._enter(replica)
            return
        self._put(replace(entry, replica=replica, source=None, is_ready=True, leaving=is_removed))

    # -- what sources find -------------------------------------------------------------------

    def follow(self, source: str, found: Sequence[Found]) -> tuple[str, ...]:
        """Make a source's replicas those that it found; return the names that changed. Idempotent.

        Args:
            source: What it is called.
            found: Its whole set; each is a replica where one may be found.
        """
        self._found[source] = {f.replica.url: f for f in found}
        before = dict(self._entries)
        self._reconcile_found()
        return self._changed_since(before)

    def _reconcile_found(self) -> None:
        wanted: dict[str, tuple[str, Found]] = {}
        for name, each in self._found.items():  # what several find is the first one's
            for url, one in each.items():
                wanted.setdefault(url, (name, one))
        self.not_entered = {}
        for entry in self.entries:
            if entry.source is not None and entry.replica.url not in wanted:
                self._put(replace(entry, leaving=True))
        for url, (name, one) in wanted.items():
            reason = self._follow_found(url, name, one, wanted)
            if reason is not None:
                self.not_entered[url] = reason

    def _changed_since(self, before: Mapping[str, Entry]) -> tuple[str, ...]:
        names = dict.fromkeys([*before, *self._entries])
        return tuple(name for name in names if before.get(name) != self._entries.get(name))

    def _follow_found(
        self, url: str, source: str, found: Found, wanted: Mapping[str, object]
    ) -> str | None:
        """Enter one, or bring its entry up to date; return why it is not entered."""
        replica = found.replica
        identity = replica.identity
        entry, record = self._at(url), self._records.get(identity)
        if entry is not None and entry.source is None and not entry.leaving:
            return None
        if entry is not None and entry.identity != identity:
            del self._entries[entry.name]
            self._names.pop(entry.identity, None)
            entry = None
        if record is not None and record.removed:
            if entry is not None:
                self._put(replace(entry, leaving=True))
            return f"{identity!r} was removed by an order; adding it takes that back"
        if entry is None:
            entry = self.of_identity(identity)  # it has moved, if it is not where it was
            is_here = entry is not None and (entry.source is None or entry.replica.url in wanted)
            if is_here or identity in self._configured:
                return f"the name {identity!r} is another replica's"
        if entry is None:
            if not found.is_ready:
                return None
            entry = self._enter(replica, None if replica.name else self._name_at(url))
        self._put(
            replace(
                entry,
                replica=replica,
                source=source,
                is_ready=found.is_ready,
                leaving=False,
                draining=record is not None and record.draining,
            )
        )
        return None

    def saved(self, identity: str, record: ReplicaRecord) -> None:
        """Learn that a record is stored; a newer one of that identity still is not."""
        if self.unsaved.get(identity) == record:
            del self.unsaved[identity]

    # -- orders given elsewhere --------------------------------------------------------------

    def apply(self, records: Mapping[str, ReplicaRecord]) -> tuple[Entry, ...]:
        """Follow the records of the store; return the entries that changed. Idempotent.

        Records that are refused are left out.
        """
        followed = {
            identity: record
            for identity, record in records.items()
            if identity not in self.unsaved and self.refused(identity, record) is None
        }
        self._records |= followed
        changed = [self._follow(identity, record) for identity, record in followed.items()]
        return tuple(entry for entry in changed if entry is not None)

    def _follow(self, identity: str, record: ReplicaRecord) -> Entry | None:
        """Apply one record; return None if it changes nothing."""
        replica = _replica(identity, record)
        configured = self._configured.get(identity, replica)
        if configured.url != replica.url:
            return None
        entry, at = self.of_identity(identity), self._at(replica.url)
        if record.discovered:
            return self._follow_drain(entry or at, identity, record)
        if at is not None and at != entry and (entry or at.identity in self._records):
            return None
        entry = entry or at
        if entry is None:
            if record.removed:
                return None
            entry = self._enter(replica)
            return self._put(replace(entry, draining=record.draining))
        wanted = replace(
            entry,
            replica=entry.replica if entry.source or entry.identity != identity else configured,
            draining=record.draining,
            leaving=record.removed,
            source=None,
        )
        return self._put(wanted) if wanted != entry else None

    def _follow_drain(
        self, entry: Entry | None, identity: str, record: ReplicaRecord
    ) -> Entry | None:
        """Follow an order about a replica that sources find; None if it changes nothing."""
        if entry is None or (entry.source is not None and entry.identity != identity):
            return None
        wanted = replace(entry, draining=record.draining)
        return self._put(wanted) if wanted != entry else None

    def refused(self, identity: str, record: ReplicaRecord) -> str | None:
        """Return why a record is not followed; None: it is.

        Writers of the store are trusted with adding replicas where they may be, but not with
        breaking names.
        """
        try:
            self._check(_replica(identity, record), is_found=record.discovered)
        except ConfigError as exc:
            return exc.message
        replica = _replica(identity, record)
        if replica.name is None and identity != replica.url:
            return f"{identity!r} is neither a name nor the replica's address"
        return None

    # -- inside ------------------------------------------------------------------------------

    def _check(self, replica: ReplicaConfig, *, is_found: bool = False) -> None:
        """Refuse what cannot be a replica, or connects to where none may be added.

        One that is found by sources is not added by what names it here.

        Raises:
            ConfigError: the message and `param` name the field.
        """
        check_replica(replica)
        check_pool(replica, self._pools)
        if is_found or replica.url in {known.url for known in self._configured.values()}:
            return
        for field, urls in replica.addresses.items():
            host = self._hosts.refused(urls)
            if host is not None:
                raise ConfigError(
                    f"{field}: {host!r} is not in admin.replica_hosts "
                    f"({', '.join(self._hosts.patterns) or 'empty'})",
                    param=field,
                )

    def _known(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(self._entries) or "none yet"
            raise UnknownReplica(f"no replica {name!r}; known: {known}", param="name")
        return entry

    def _match(self, replica: ReplicaConfig) -> Entry | None:
        """Find the entry that a replica to add is; None if it is a new one."""
        at = self._at(replica.url)
        self._check_places(replica, at)
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

    def _check_places(self, replica: ReplicaConfig, at: Entry | None) -> None:
        """Refuse a replica with an event endpoint of another one; `at` has its URL."""
        for other in self._entries.values():
            taken = {} if other is at or other.leaving else other.replica.places
            for field, place in replica.places.items():
                if place in taken.values():
                    raise ReplicaConflict(
                        f"{field}: {place} is an address of {other.name!r}; each engine has ports "
                        "of its own",
                        param=field,
                    )

    def _at(self, url: str) -> Entry | None:
        place = place_of(url)
        return next((e for e in self._entries.values() if place_of(e.replica.url) == place), None)

    def _enter(self, replica: ReplicaConfig, name: str | None = None) -> Entry:
        """Begin an entry, under a name that is free: the given one if possible."""
        identity = replica.name or replica.url
        if name is None:
            is_free = replica.name and replica.name not in self._entries
            name = replica.name if is_free else self._free_name(identity)
        assert name is not None
        self._names[identity] = name
        replica = self._configured.get(identity, replica)
        return self._put(Entry(name=name, identity=identity, replica=replica))

    def _put(self, entry: Entry) -> Entry:
        self._entries[entry.name] = entry
        return entry

    def _ordered(self, entry: Entry) -> None:
        record = entry.record()
        self._records[entry.identity] = self.unsaved[entry.identity] = record

    def _free_name(self, identity: str) -> str:
        """Return `rN`: the one it had before, else one never given out."""
        had = self._names.get(identity)
        if had is not None and had not in self._entries:
            return had
        taken = {*self._entries, *self._names.values()}
        return next(name for name in self._candidates() if name not in taken)

    def _name_at(self, url: str) -> str:
        """Return a name for what was found at an address: HOST-PORT, as all routers call it."""
        base = re.sub(r"[^A-Za-z0-9._-]", "-", urlsplit(url).netloc.strip("[]"))[:60]
        names = chain([base], (f"{base}-{number}" for number in count(2)))
        return next(name for name in names if name not in self._entries)

    def _candidates(self) -> Iterator[str]:
        return (f"r{number}" for number in self._numbers)


def _replica(identity: str, record: ReplicaRecord) -> ReplicaConfig:
    name = None if "://" in identity else identity
    return ReplicaConfig(
        url=record.url,
        name=name,
        events=record.events,
        replay=record.replay,
        role=record.role,
        transfer=record.transfer,
        hardware=record.hardware,
        weight=record.weight,
        eagle=record.eagle,
        pool=record.pool,
        bootstrap=record.bootstrap,
    )
