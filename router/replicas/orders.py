"""Orders: what operators ordered about replicas, here or on another router, as records.

A record is shared with the other routers. An order that is not stored yet is newer than the record
of the store. A record that is missing there changes nothing: a store that lost its data removes no
replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.addresses import place_of
from router.config import ReplicaConfig
from router.messages import ReplicaRecord

NO_ORDER: Final = ReplicaRecord(url="")

_SHARED: Final = (
    "url",
    "events",
    "replay",
    "role",
    "transfer",
    "hardware",
    "weight",
    "eagle",
    "pool",
    "bootstrap",
)
"""The fields of a replica that a record has."""


class Orders:
    """The latest record of each identity.

    unsaved: Those that were given here, and are not known to be stored.
    """

    __slots__ = ("_by_place", "_records", "unsaved")

    def __init__(self) -> None:
        self.unsaved: dict[str, ReplicaRecord] = {}
        self._records: dict[str, ReplicaRecord] = {}
        self._by_place: dict[str, ReplicaRecord] = {}  # of those that no source found

    @property
    def records(self) -> Mapping[str, ReplicaRecord]:
        """All records by identity: for a store that lost them."""
        return self._records

    def about(self, identity: str, place: str, *, is_found: bool) -> ReplicaRecord:
        """Return the record that applies to a replica: of its identity, else at its address.

        A record of a configured identity at another address does not count.
        """
        order = self._records.get(identity)
        if order is None or (not is_found and place_of(order.url) != place):
            order = self._by_place.get(place, NO_ORDER)
        return order

    def give(self, identity: str, record: ReplicaRecord) -> None:
        """Give an order here."""
        self.unsaved[identity] = record
        self.take({identity: record})

    def take(self, records: Mapping[str, ReplicaRecord]) -> None:
        """Take records in; they replace those of the same identities."""
        self._records |= records
        self._index()

    def saved(self, identity: str, record: ReplicaRecord) -> None:
        """Record that an order is stored; a newer one of that identity still is not."""
        if self.unsaved.get(identity) == record:
            del self.unsaved[identity]

    def withdraw(self, identity: str) -> None:
        """Drop the record of a replica that is no longer configured, unless it was removed."""
        if not self._records.get(identity, NO_ORDER).removed:
            self._records.pop(identity, None)
            self._index()

    def _index(self) -> None:
        self._by_place = {place_of(r.url): r for r in self._records.values() if not r.discovered}


def record_of(
    replica: ReplicaConfig, *, draining: bool = False, removed: bool = False, found: bool = False
) -> ReplicaRecord:
    """Write down what is ordered about a replica; `found`: by a source."""
    fields = {field: getattr(replica, field) for field in _SHARED}
    return ReplicaRecord(draining=draining, removed=removed, discovered=found, **fields)


def replica_of(identity: str, record: ReplicaRecord) -> ReplicaConfig:
    """Return the replica that a record describes."""
    name = None if "://" in identity else identity
    return ReplicaConfig(name=name, **{field: getattr(record, field) for field in _SHARED})
