"""The faults of a run, with their targets and lengths, drawn from a seed.

This module has the kinds of faults and their limits. `faults` makes them. There is no clock here.

At most two replicas are disturbed at a time, for one router or for both. Two replicas can always
answer, so a retry can save a request that fails before its first byte.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct

REPLICAS: Final = ("r1", "r2", "r3", "r4")
ROUTERS: Final = ("a", "b")

Group = Literal["replica", "events", "router", "redis", "pool"]
"""The limit of simultaneous faults counts each group together."""

AT_ONCE: Final[dict[Group, int]] = {
    "replica": 2, "events": 2, "router": 1, "redis": 1, "pool": 1
}  # fmt: skip

_BACK_S: Final = 5.0  # until a process that was killed answers again, about


class Kind(Struct, frozen=True):
    """One kind of fault. `longest_s` 0: it happens in an instant."""

    name: str
    group: Group
    weight: int
    longest_s: float
    per_router: bool = False  # its target is the way from one router, "a-r1"
    restarts: bool = False

    @property
    def num_targets(self) -> int:
        return sum(1 for _ in _targets(self))


KINDS: Final = (
    Kind("replica killed", "replica", 6, 3.0, restarts=True),
    Kind("replica paused", "replica", 4, 5.0),
    Kind("replica answers 500", "replica", 2, 3.0),
    Kind("replica dies in answers", "replica", 3, 3.0),
    Kind("replica hangs", "replica", 1, 3.0),
    Kind("replica aborts before answers", "replica", 2, 3.0),
    Kind("replica aborts in answers", "replica", 2, 3.0),
    Kind("replica pauses by order", "replica", 3, 12.0),
    Kind("replica sleeps", "replica", 2, 12.0),
    Kind("http held", "replica", 3, 5.0, per_router=True),
    Kind("http refused", "replica", 2, 3.0, per_router=True),
    Kind("http slow", "replica", 1, 3.0, per_router=True),
    Kind("http drips", "replica", 1, 3.0, per_router=True),
    Kind("http reset", "replica", 3, 0.0, per_router=True),
    Kind("http half-closed", "replica", 2, 0.0, per_router=True),
    Kind("all held", "replica", 2, 5.0, per_router=True),
    Kind("garbage events", "events", 3, 0.0),
    Kind("events lost", "events", 1, 0.0),
    Kind("events held", "events", 2, 5.0, per_router=True),
    Kind("events refused", "events", 1, 5.0, per_router=True),
    Kind("events reset", "events", 2, 0.0, per_router=True),
    Kind("router killed", "router", 2, 1.5, restarts=True),
    Kind("router ended", "router", 1, 1.0, restarts=True),
    Kind("router paused", "router", 2, 3.0),
    Kind("router's clock stepped", "router", 2, 3.0),
    Kind("router out of descriptors", "router", 2, 3.0),
    Kind("router's disk hangs", "router", 2, 4.0),
    Kind("router gets large bodies", "router", 2, 0.0),
    Kind("redis killed", "redis", 2, 3.0, restarts=True),
    Kind("redis paused", "redis", 2, 4.0),
    Kind("redis full", "redis", 2, 4.0),
    Kind("redis emptied", "redis", 1, 0.0),
    Kind("redis held", "redis", 2, 4.0, per_router=True),
    Kind("redis refused", "redis", 1, 4.0, per_router=True),
    Kind("redis slow", "redis", 1, 4.0, per_router=True),
    Kind("pool killed", "pool", 1, 3.0, restarts=True),
    Kind("pool paused", "pool", 1, 4.0),
)


class Fault(Struct, frozen=True, kw_only=True):
    """One fault as planned; times in seconds since the run began."""

    number: int
    kind: Kind
    target: str
    at_s: float
    duration_s: float


def plan(seed: int, length_s: float, every_s: float) -> list[Fault]:
    """Draw the faults of a run: one every `every_s` seconds on average, none near its end.

    After the first third, router b is not killed any more: it must live long enough to show
    whether its memory grows.
    """
    dice = random.Random(f"chaos/{seed}")
    faults: list[Fault] = []
    busy: list[tuple[Group, str, float]] = []  # with when it is over, about
    at_s = min(3.0, length_s / 8)
    while at_s < length_s - min(4.0, length_s / 6):
        busy = [entry for entry in busy if entry[2] > at_s]
        is_late = at_s > length_s / 3
        possible = [
            (kind, target)
            for kind in KINDS
            for target in _targets(kind)
            if _num_busy(busy, kind.group) < AT_ONCE[kind.group]
            and not any(touches(target, taken) for _, taken, _ in busy)
            and not (is_late and kind.restarts and target == "b")
        ]
        if possible:
            weights = [kind.weight / kind.num_targets for kind, _ in possible]
            kind, target = dice.choices(possible, weights)[0]
            longest_s = min(kind.longest_s, length_s - at_s)
            duration_s = round(dice.uniform(0.2, 1.0) * longest_s, 2)
            fault = Fault(
                number=len(faults) + 1,
                kind=kind,
                target=target,
                at_s=round(at_s, 2),
                duration_s=duration_s,
            )
            faults.append(fault)
            over_s = at_s + duration_s + (_BACK_S if kind.restarts else 0.5)
            busy.append((kind.group, target, over_s))
        at_s += dice.expovariate(1 / every_s)
    return faults


def _num_busy(busy: list[tuple[Group, str, float]], group: Group) -> int:
    return sum(taken == group for taken, _, _ in busy)


def _targets(kind: Kind) -> Iterator[str]:
    named: dict[Group, tuple[str, ...]] = {
        "replica": REPLICAS,
        "events": REPLICAS,
        "router": ROUTERS,
        "redis": ("redis",),
        "pool": ("pool",),
    }
    for target in named[kind.group]:
        if kind.per_router:
            yield from (f"{router}-{target}" for router in ROUTERS)
        else:
            yield target


def touches(one: str, other: str) -> bool:
    """Whether two targets are, or lead to, the same process."""
    return one.rpartition("-")[2] == other.rpartition("-")[2]
