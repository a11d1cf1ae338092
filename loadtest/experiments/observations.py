"""An experiment's requests as arrays, each with its randomised unit and its weight.

This module decides which requests count, and for which variant:

1. Wash-out does not count.
2. A unit counts for its first variant until it is seen in another one (a ramp moved it, or routers
   disagree).
3. Variants are compared while both had traffic. After one was stopped, the other's later hours have
   no counterpart.
4. A request stands for 1 / share requests of the traffic, so that ramps bias nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.experiments.metrics import METRICS
from loadtest.experiments.records import Named, Records, Request
from loadtest.statistics.effects import Floats, Ints, totals
from router.records.record import AssignmentRecord

Bools = NDArray[np.bool_]
Window = tuple[float, float]
"""Begin and end in unix seconds; infinite: no bound."""

SURPRISE: Final = 0.001
"""A variant without any of the last (first) units counts as stopped (not yet started) if chance
alone would do that less often."""

SOURCES: Final = ("gpu", "cpu", "pool", "computed")


class Crossed(Struct, frozen=True, kw_only=True):
    """A unit that was in several variants; `is_back`: it returned to the first one."""

    unit: str
    arms: tuple[str, ...]
    files: tuple[str, ...]
    is_back: bool


class Observations(Struct, frozen=True, kw_only=True):
    """Requests in order of their ends, shape (num_requests,); units in order of their beginnings.

    `numerators` and `denominators` of a metric are NaN and 0 if a request has no outcome.
    """

    experiment: Named
    requests: tuple[Request, ...]
    arms: tuple[str, ...]
    at_s: Floats  # unix seconds, end of the request
    started_s: Floats
    unit: Ints
    counts: Bools  # by the rules
    is_wash_out: Bools
    weight: Floats
    sources: dict[str, Floats]  # prompt tokens as predicted: gpu, cpu, pool, computed
    numerators: dict[str, Floats]
    denominators: dict[str, Floats]
    unit_arm: Ints  # index of its first variant
    unit_first_s: Floats
    unit_share: Floats
    unit_slot: Ints  # -1 where the design has no slots
    crossed: tuple[Crossed, ...]
    windows: tuple[Window, ...]  # of each variant: while it had traffic

    @property
    def num_units(self) -> int:
        """Return the number of units of all variants."""
        return len(self.unit_arm)

    def window(self, *arms: str) -> Window:
        """Return when all of these variants (default: all) had traffic."""
        windows = [self.windows[self.arms.index(arm)] for arm in arms or self.arms]
        return max(begin for begin, _ in windows), min(end for _, end in windows)

    def counted(self, window: Window) -> Bools:
        """Select the requests that count and, with their units, began in a window."""
        begin_s, end_s = window
        is_in = (self.unit_first_s[self.unit] >= begin_s) & (self.started_s <= end_s)
        return self.counts & is_in

    def sums(
        self, metric: str, counted: Bools | None = None, until_s: float = np.inf
    ) -> tuple[Floats, Floats]:
        """Return weighted sums of numerators and denominators of counted requests, by unit."""
        counted = self.counts if counted is None else counted
        end = len(self.at_s) if np.isinf(until_s) else np.searchsorted(self.at_s, until_s, "right")
        chosen = counted[:end] & (self.denominators[metric][:end] > 0)
        unit, weight = self.unit[:end][chosen], self.weight[:end][chosen]
        numerators = self.numerators[metric][:end][chosen]
        denominators = self.denominators[metric][:end][chosen]
        return (
            totals(unit, weight * numerators, self.num_units),
            totals(unit, weight * denominators, self.num_units),
        )

    def pair(self, arm: str, baseline: str) -> tuple[Ints, Bools, Ints | None]:
        """Return the units of two variants, which of them are the first's, and their blocks."""
        index = self.arms.index
        units = np.flatnonzero(np.isin(self.unit_arm, (index(arm), index(baseline))))
        blocks = self.blocks()
        is_treated = self.unit_arm[units] == index(arm)
        return units, is_treated, None if blocks is None else blocks[units]

    def blocks(self) -> Ints | None:
        """Return the numbers of pairs of slots, if each pair was drawn to have both variants."""
        if self.experiment.design != "switchback" or len(self.arms) != 2:
            return None
        pair = self.unit_slot // 2
        order = np.lexsort((self.unit_slot, pair))
        first, second = order[:-1], order[1:]
        is_pair = (pair[first] == pair[second]) & (
            self.unit_slot[first] + 1 == self.unit_slot[second]
        )
        differ = self.unit_arm[first] != self.unit_arm[second]
        if np.count_nonzero(is_pair) < 10 or not np.all(differ[is_pair]):
            return None  # ten pairs by chance: one in 1,000
        return np.unique(pair, return_inverse=True)[1].astype(np.int64)


def observe(records: Records, experiment: Named) -> Observations:
    """Return an experiment's requests."""
    requests = tuple(
        each
        for each in records.requests
        if each.assignment is not None
        and each.assignment.experiment == experiment.name
        and each.trial in experiment.trials
    )
    units = _units(requests)
    number = {unit.name: index for index, unit in enumerate(units)}
    of_request = [number[_assigned(each).unit] for each in requests]
    arms = experiment.arms
    unit_arm = np.array([arms.index(unit.arm) for unit in units], dtype=np.int64)
    first_s = np.array([unit.first_s for unit in units])
    unit_share = np.array([_share(unit.share) for unit in units])
    is_wash_out = np.array([each.not_counted is not None for each in requests])
    in_first_arm = np.array(
        [
            _assigned(each).arm == units[index].arm and each.started_s < units[index].left_s
            for each, index in zip(requests, of_request, strict=True)
        ]
    )
    values = {
        name: [(metric.numerator(each), metric.denominator(each)) for each in requests]
        for name, metric in METRICS.items()
    }
    return Observations(
        experiment=experiment,
        requests=requests,
        arms=arms,
        at_s=np.array([each.at_s for each in requests]),
        started_s=np.array([each.started_s for each in requests]),
        unit=np.array(of_request, dtype=np.int64),
        counts=in_first_arm & ~is_wash_out,
        is_wash_out=is_wash_out,
        weight=np.array([1 / _share(_assigned(each).share) for each in requests]),
        sources=_sources(requests),
        numerators={
            name: np.array([np.nan if num is None else num for num, _ in pairs])
            for name, pairs in values.items()
        },
        denominators={
            name: np.array([0.0 if num is None else float(den or 0) for num, den in pairs])
            for name, pairs in values.items()
        },
        unit_arm=unit_arm,
        unit_first_s=first_s,
        unit_share=unit_share,
        unit_slot=np.array(
            [-1 if unit.slot is None else unit.slot for unit in units], dtype=np.int64
        ),
        crossed=_crossed(units),
        windows=tuple(
            _window(requests, arm, np.flatnonzero(unit_arm == index), first_s, unit_share)
            for index, arm in enumerate(arms)
        ),
    )


class _Unit:
    """A unit's requests, and its first variant."""

    __slots__ = ("arm", "first_s", "left_s", "name", "requests", "share", "slot")

    def __init__(self, name: str, requests: list[Request]) -> None:
        first = min(requests, key=lambda each: each.started_s)
        self.name = name
        self.requests = requests
        self.first_s = first.started_s
        self.arm = _assigned(first).arm
        self.share = _assigned(first).share
        self.slot = _assigned(first).slot
        others = [each.started_s for each in requests if _assigned(each).arm != self.arm]
        self.left_s = min(others, default=np.inf)


def _units(requests: Sequence[Request]) -> list[_Unit]:
    """Group requests by unit, in the order of the units' beginnings."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(_assigned(request).unit, []).append(request)
    units = [_Unit(name, own) for name, own in found.items()]
    return sorted(units, key=lambda unit: (unit.first_s, unit.name))


def _assigned(request: Request) -> AssignmentRecord:
    assert request.assignment is not None
    return request.assignment


def _sources(requests: Sequence[Request]) -> dict[str, Floats]:
    """Return where prompt tokens come from, as predicted: gpu, cpu, pool, computed."""
    parts = []
    for each in requests:
        predicted = each.predicted or 0
        gpu, held = min(each.num_gpu_tokens, predicted), min(each.held, predicted)
        computed = (each.prompt or 0) - predicted
        parts.append((gpu, max(0, held - each.num_gpu_tokens), predicted - held, computed))
    columns = np.array(parts, dtype=float).reshape(-1, len(SOURCES)).T
    return dict(zip(SOURCES, columns, strict=True))


def _window(
    requests: Sequence[Request], arm: str, own: Ints, first_s: Floats, share: Floats
) -> Window:
    """Return from when to when a variant had traffic of its own.

    Routers mark the requests of a stopped variant. Without marks it counts as stopped if so long a
    time without a unit would be a surprise at its share.
    """
    if not len(own):
        return -np.inf, np.inf
    begin, end = -np.inf, np.inf
    first, last = int(own[0]), int(own[-1])
    if (1 - share[first]) ** first < SURPRISE:
        begin = float(first_s[first])
    if (1 - share[last]) ** (len(first_s) - 1 - last) < SURPRISE:
        end = float(first_s[last])
    stopped = [
        each.started_s
        for each in requests
        if each.not_counted == "stopped" and _assigned(each).arm == arm
    ]
    return begin, min(end, float(np.nextafter(min(stopped), 0.0)) if stopped else end)


def _crossed(units: Sequence[_Unit]) -> tuple[Crossed, ...]:
    crossed = [
        Crossed(
            unit=unit.name,
            arms=tuple(sorted({_assigned(each).arm for each in unit.requests})),
            files=tuple(sorted({each.file for each in unit.requests})),
            is_back=any(
                _assigned(each).arm == unit.arm and each.started_s > unit.left_s
                for each in unit.requests
            ),
        )
        for unit in units
        if unit.left_s < np.inf
    ]
    return tuple(sorted(crossed, key=lambda each: (not each.is_back, each.unit)))


def _share(share: float) -> float:
    """Return a share; a value that is no share (0, above 1) weighs as 1."""
    return share if 0 < share <= 1 else 1.0
