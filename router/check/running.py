"""A router that runs on this machine: which replicas it has, and what it counted of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from router.base.addresses import place_digest
from router.check.seen import ReplicaSeen

Kinship = Literal["these", "some", "others"]
"""Which replicas a router has: all that are checked, some of them, or none."""

_SAMPLE: Final = re.compile(r"^(warmroute_\w+)(?:\{([^}]*)\})? ([0-9.e+]+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_MAX_NAMED: Final = 3


class RouterSeen(Struct, frozen=True, kw_only=True):
    """What a router says of its replicas, each by a digest of its address."""

    names: dict[str, str]
    urls: dict[str, str] = {}  # empty: it does not say
    answered: dict[str, int] = {}  # requests
    audited: dict[str, int] = {}  # those whose answer reported cached tokens


class _Replica(Struct):
    name: str
    url: str


class _Listing(Struct):
    replicas: tuple[_Replica, ...]


def of_metrics(page: str | None) -> RouterSeen | None:
    """Read a page of metrics; None: it names no replica, or is of an older release."""
    named = {
        labels["replica"]: labels["place"]
        for labels, _ in _samples(page or "", "warmroute_replica_info")
    }
    if not named:
        return None
    return RouterSeen(
        names={place: name for name, place in named.items()},
        answered=_by_place(page or "", "warmroute_requests_total", named),
        audited=_by_place(page or "", "warmroute_audited_total", named),
    )


def of_listing(page: str | None) -> RouterSeen | None:
    """Read the admin port's list of replicas; None: it is none, or has no replica."""
    try:
        listed = msgspec.json.decode(page or "", type=_Listing).replicas
    except msgspec.DecodeError:
        return None
    if not listed:
        return None
    places = {place_digest(each.url): each for each in listed}
    return RouterSeen(
        names={place: each.name for place, each in places.items()},
        urls={place: each.url for place, each in places.items()},
    )


def kinship(seen: RouterSeen, replicas: Sequence[ReplicaSeen]) -> Kinship:
    """Return whether a router is that of the checked replicas; without any of these it is."""
    known = [place_digest(each.url) in seen.names for each in replicas]
    return "these" if all(known) else "some" if any(known) else "others"


def described(seen: RouterSeen, replicas: Sequence[ReplicaSeen]) -> str:
    """Return whose router it is, in words."""
    match kinship(seen, replicas):
        case "these":
            return "the router of these replicas"
        case "some":
            lacking = [each.url for each in replicas if place_digest(each.url) not in seen.names]
            return f"a router of some of these replicas, which lacks {_first(lacking)}"
        case "others":
            return f"a router of other replicas ({_first([*(seen.urls or seen.names).values()])})"


def num_of(counts: dict[str, int], replicas: Sequence[ReplicaSeen]) -> int:
    """Add up what a router counted of the checked replicas; without any of these, of all."""
    places = {place_digest(each.url) for each in replicas} or counts.keys()
    return sum(number for place, number in counts.items() if place in places)


def _by_place(page: str, name: str, named: dict[str, str]) -> dict[str, int]:
    """Add up a counter by replica: its label may name a rank (`r1#0`)."""
    counts: dict[str, int] = {}
    for labels, value in _samples(page, name):
        place = named.get(labels.get("replica", "").partition("#")[0])
        if place is not None:
            counts[place] = counts.get(place, 0) + round(value)
    return counts


def _samples(page: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    for found, labels, value in _SAMPLE.findall(page):
        if found == name:
            yield dict(_LABEL.findall(labels)), float(value)


def _first(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])
