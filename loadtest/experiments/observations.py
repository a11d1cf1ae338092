"""An experiment's requests as arrays, each with its randomised unit; and the metrics.

Requests in the wash-out of a time slot do not count. A metric is a sum over requests divided by a
sum over requests. Its value is None if a request has no such outcome (no usage reported, not
streamed, failed before).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.experiments.records import Named, Records, Request
from loadtest.statistics.effects import Floats, Ints, totals
from router.records.record import AssignmentRecord

Bools = NDArray[np.bool_]
Value = Callable[[Request], float | None]


class Metric(Struct, frozen=True, kw_only=True):
    """A metric. Relative ones are compared by their ratio, the others by their difference."""

    title: str
    unit: str  # "ms", "tokens", "%": a share
    numerator: Value
    denominator: Value = lambda request: 1.0
    is_relative: bool = True
    is_lower_better: bool = True
    better: str = "lower"
    worse: str = "higher"


def _inter_token(request: Request) -> float | None:
    """Return the time from the first token to the end of an answer."""
    if request.outcome != "ok" or request.ttft_ms is None or (request.completion or 0) <= 1:
        return None
    return max(0.0, request.total_ms - request.ttft_ms)


def _computed(request: Request) -> float | None:
    known = request.prompt is not None and request.reported is not None
    return (request.prompt or 0) - (request.reported or 0) if known else None


def _pooled(request: Request) -> float | None:
    return None if request.predicted is None else max(0, request.predicted - request.held)


def _share(title: str, numerator: Value, denominator: Value = lambda request: 1.0) -> Metric:
    return Metric(
        title=title, unit="%", numerator=numerator, denominator=denominator, is_relative=False
    )


def _time(title: str, numerator: Value, denominator: Value = lambda request: 1.0) -> Metric:
    return Metric(
        title=title, unit="ms", numerator=numerator, denominator=denominator, better="faster",
        worse="slower",
    )  # fmt: skip


METRICS: Final = {
    "ttft": _time("time to first token", lambda request: request.ttft_ms),
    "tbt": _time(
        "inter-token latency (estimate)",
        _inter_token,
        lambda request: (request.completion or 0) - 1,
    ),
    "total": _time(
        "total time", lambda request: request.total_ms if request.outcome == "ok" else None
    ),
    "waited": _time("time in the router's queue", lambda request: request.waited_ms),
    "computed": Metric(title="computed tokens per request", unit="tokens", numerator=_computed),
    "cached": Metric(
        title="cached share of the prompt",
        unit="%",
        numerator=lambda request: request.reported,
        denominator=lambda request: request.prompt,
        is_relative=False,
        is_lower_better=False,
        better="higher",
        worse="lower",
    ),
    "pool": _share(
        "share of the prompt fetched from the pool (predicted)",
        _pooled,
        lambda request: request.prompt,
    ),
    "errors": _share(
        "error rate (no answer, 5xx, broken off)",
        lambda request: float(request.outcome in ("replica_failed", "replica_unreachable")),
    ),
    "gone": _share(
        "clients that left before the end",
        lambda request: float(request.outcome == "client_gone"),
    ),
}
"""All metrics, in the order of a report."""


class Observations(Struct, frozen=True, kw_only=True):
    """Requests in order of their ends, shape (num_requests,); units in order of their beginnings.

    `numerators` and `denominators` of a metric are NaN and 0 if a request has no outcome.
    """

    experiment: Named
    requests: tuple[Request, ...]
    arms: tuple[str, ...]  # the control first
    unit: Ints
    counts: Bools
    numerators: dict[str, Floats]
    denominators: dict[str, Floats]
    unit_arm: Ints
    unit_slot: Ints  # -1 where the design has no slots
    num_crossed: int  # units with requests in several variants

    @property
    def num_units(self) -> int:
        """Return the number of units of all variants."""
        return len(self.unit_arm)

    @property
    def arm(self) -> Ints:
        """Return the variant of each request."""
        return self.unit_arm[self.unit]

    def sums(self, metric: str) -> tuple[Floats, Floats]:
        """Return sums of numerators and denominators of counted requests, by unit."""
        chosen = self.counts & (self.denominators[metric] > 0)
        unit = self.unit[chosen]
        return (
            totals(unit, self.numerators[metric][chosen], self.num_units),
            totals(unit, self.denominators[metric][chosen], self.num_units),
        )

    def pair(self, arm: str) -> tuple[Ints, Bools, Ints | None]:
        """Return the units of a variant and the control, which are the variant's, their blocks."""
        index = self.arms.index(arm)
        units = np.flatnonzero(np.isin(self.unit_arm, (index, 0)))
        blocks = self.blocks()
        return units, self.unit_arm[units] == index, None if blocks is None else blocks[units]

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
    requests = tuple(each for each in records.requests if experiment.has(each.assignment))
    units: dict[str, AssignmentRecord] = {}
    crossed: set[str] = set()
    for each in sorted(requests, key=lambda request: request.started_s):
        first = units.setdefault(assigned(each).unit, assigned(each))
        if assigned(each).arm != first.arm:
            crossed.add(first.unit)
    number = {name: index for index, name in enumerate(units)}
    arms = experiment.arms
    values = {
        name: [(metric.numerator(each), metric.denominator(each)) for each in requests]
        for name, metric in METRICS.items()
    }
    return Observations(
        experiment=experiment,
        requests=requests,
        arms=arms,
        unit=np.array([number[assigned(each).unit] for each in requests], dtype=np.int64),
        counts=np.array([assigned(each).not_counted is None for each in requests]),
        numerators={
            name: np.array([np.nan if num is None else num for num, _ in pairs])
            for name, pairs in values.items()
        },
        denominators={
            name: np.array([0.0 if num is None else float(den or 0) for num, den in pairs])
            for name, pairs in values.items()
        },
        unit_arm=np.array([arms.index(first.arm) for first in units.values()], dtype=np.int64),
        unit_slot=np.array(
            [-1 if first.slot is None else first.slot for first in units.values()], dtype=np.int64
        ),
        num_crossed=len(crossed),
    )


def assigned(request: Request) -> AssignmentRecord:
    """Return the variant of an experiment's request."""
    assert request.assignment is not None
    return request.assignment
