"""Whether a replica's event endpoints are its own engine's, by what engines report themselves.

An endpoint that is copied from another replica leads to a working publisher: its events look right,
and predictions are wrong. An endpoint that is configured twice is refused (router.config.checks).
This module compares what engines report (`/kv_event_sources`). Pure.

    foreign    it is another replica's: its events are not followed
    doubtful   the engine reports another port: a port mapping of its container, or a mistake
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from msgspec import Struct

from router.base.addresses import endpoint_place


class EventPorts(Struct, frozen=True):
    """A replica's event endpoints by field, `events[RANK]` and `replay[RANK]`, as places."""

    replica: str
    used: Mapping[str, str] = {}  # where a router connects to
    reported: Mapping[str, str] = {}  # by its engine, at the replica's own host; {}: none are

    @classmethod
    def of(
        cls,
        replica: str,
        url: str,
        used: Mapping[int, tuple[str, str | None]],
        reported: Mapping[int, tuple[str, str | None]],
    ) -> Self:
        """Build it from each rank's event and replay endpoint."""
        return cls(replica, _places(url, used), _places(url, reported))

    def why_doubtful(self) -> str | None:
        """Return how a configured endpoint differs from the reported one; None: it does not."""
        for field, place in self.used.items():
            own, port = _port(self.reported.get(field, "")), _port(place)
            if own and port and own != port:
                return f"{field} is {place}, and its engine reports port {own}"
        return None


class EventOwners:
    """Which replicas use and report which endpoints."""

    __slots__ = ("_ports", "_reporting", "_using")

    def __init__(self, all_ports: Iterable[EventPorts]) -> None:
        self._ports = {ports.replica: ports for ports in all_ports}
        self._using: defaultdict[str, set[str]] = defaultdict(set)
        self._reporting: defaultdict[str, set[str]] = defaultdict(set)
        for name, ports in self._ports.items():
            for place in ports.used.values():
                self._using[place].add(name)
            for place in ports.reported.values():
                self._reporting[place].add(name)

    def why_foreign(
        self, replica: str, rank: int, counts: Callable[[str], bool] = lambda _: True
    ) -> str | None:
        """Return why a rank's events are not to be followed; None: nothing speaks against it.

        Args:
            counts: Whether another replica of that name does: one that is gone has no endpoint.
        """
        ports = self._ports.get(replica)
        for field in (f"events[{rank}]", f"replay[{rank}]"):
            place = ports.used.get(field) if ports is not None else None
            if ports is None or place is None:
                continue
            own, others = self._reporting[place], {replica}
            if replica in own:
                others |= self._using[place] - own  # it is ours; those are wrong
            for other in sorted(self._using[place] - others):
                if counts(other):
                    return f"{field}: {place} is an event endpoint of {other}, too"
            if replica not in own and self._is_exchanged(ports):
                for other in sorted(own):
                    if counts(other):
                        return f"{field}: {place} is an event endpoint of {other}"
        return None

    def _is_exchanged(self, ports: EventPorts) -> bool:
        """Return whether another one uses what a replica's own engine reports.

        That others report what a replica uses proves nothing alone: the ports of its container may
        be mapped to these.
        """
        return any(self._using[place] - {ports.replica} for place in ports.reported.values())


def _places(url: str, endpoints: Mapping[int, tuple[str, str | None]]) -> dict[str, str]:
    places: dict[str, str] = {}
    for rank, (events, replay) in endpoints.items():
        places[f"events[{rank}]"] = endpoint_place(events, url)
        if replay is not None:
            places[f"replay[{rank}]"] = endpoint_place(replay, url)
    return places


def _port(place: str) -> str:
    """Return the port of a place; empty: it is a path, or none."""
    return "" if "://" in place else place.rpartition(":")[2]
