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

from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.experiments.metrics import HELD, METRICS
from loadtest.experiments.records import Named, Records
from loadtest.statistics.effects import Floats, Ints, totals

Bools = NDArray[np.bool_]
Window = tuple[float, float]
"""Begin and end in unix seconds; infinite: no bound."""

SURPRISE: Final = 0.001
"""A variant without any of the last (first) units counts as stopped (not yet started) if chance
alone would do that less often."""

_masked: Any = np.ma  # typed in some releases of numpy only

SOURCES: Final = ("gpu", "cpu", "pool", "recomputed")

_SOURCES: Final = (
    "least(coalesce(chosen.num_gpu_tokens, 0), predicted) AS gpu, "
    f"greatest(0, least({HELD}, predicted) - coalesce(chosen.num_gpu_tokens, 0)) AS cpu, "
    f"greatest(0, predicted - {HELD}) AS pool, prompt - predicted AS recomputed"
)

_UNITS: Final = """
CREATE OR REPLACE TEMP TABLE units AS
SELECT row_number() OVER (ORDER BY first_s, unit) - 1 AS id, *
FROM (
  SELECT unit, min(started_s) AS first_s, arg_min(arm, started_s) AS first_arm,
    arg_min(share, started_s) AS first_share, any_value(slot) AS slot
  FROM chosen GROUP BY unit
)
"""

_CHOSEN: Final = """
CREATE OR REPLACE TEMP TABLE chosen AS
SELECT *, at_s - total_ms / 1000 AS started_s FROM records
WHERE experiment = ? AND list_contains(?, trial) AND arm IS NOT NULL AND unit IS NOT NULL
"""

_LEAVING: Final = """
CREATE OR REPLACE TEMP TABLE leaving AS
SELECT c.unit, min(c.started_s) AS left_s,
  list_sort(list(DISTINCT c.arm)) AS arms
FROM chosen c JOIN units u ON c.unit = u.unit AND c.arm <> u.first_arm GROUP BY c.unit
"""


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
    arms: tuple[str, ...]
    at_s: Floats  # unix seconds, end of the request
    started_s: Floats
    unit: Ints
    counts: Bools  # by the rules
    is_wash_out: Bools
    weight: Floats
    sources: dict[str, Floats]  # prompt tokens as predicted: gpu, cpu, pool, recomputed
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
    """Fetch an experiment's requests."""
    records.connection.execute(_CHOSEN, [experiment.name, list(experiment.trials)])
    records.connection.execute(_UNITS)
    records.connection.execute(_LEAVING)
    arms = experiment.arms
    unit_columns = records.columns(
        "SELECT list_position(?, first_arm) - 1 AS arm, first_s, "
        "coalesce(first_share, 1.0) AS share, coalesce(slot, -1) AS slot FROM units ORDER BY id",
        [list(arms)],
    )
    unit_arm = _ints(unit_columns["arm"])
    first_s = _floats(unit_columns["first_s"])
    unit_share = _shares(unit_columns["share"])
    columns = records.columns(_requests())
    is_wash_out = _bools(columns["is_wash_out"])
    return Observations(
        experiment=experiment,
        arms=arms,
        at_s=_floats(columns["at_s"]),
        started_s=_floats(columns["started_s"]),
        unit=_ints(columns["unit"]),
        counts=_bools(columns["is_first_arm"]) & ~is_wash_out,
        is_wash_out=is_wash_out,
        weight=1 / _shares(columns["share"]),
        sources={name: np.nan_to_num(_floats(columns[name])) for name in SOURCES},
        numerators={name: _floats(columns[f"{name}_num"]) for name in METRICS},
        denominators={name: np.nan_to_num(_floats(columns[f"{name}_den"])) for name in METRICS},
        unit_arm=unit_arm,
        unit_first_s=first_s,
        unit_share=unit_share,
        unit_slot=_ints(unit_columns["slot"]),
        crossed=_crossed(records),
        windows=tuple(
            _window(records, arm, np.flatnonzero(unit_arm == index), first_s, unit_share)
            for index, arm in enumerate(arms)
        ),
    )


def _requests() -> str:
    measured = ", ".join(
        f"CAST({m.numerator} AS DOUBLE) AS {m.name}_num, "
        f"CAST(CASE WHEN ({m.numerator}) IS NOT NULL THEN {m.denominator} END AS DOUBLE) "
        f"AS {m.name}_den"
        for m in METRICS.values()
    )
    return (
        "SELECT u.id AS unit, at_s, started_s, is_wash_out, coalesce(share, 1.0) AS share, "
        "arm = first_arm AND (left_s IS NULL OR started_s < left_s) "
        f"AS is_first_arm, {_SOURCES}, {measured} "
        "FROM chosen c JOIN units u ON c.unit = u.unit LEFT JOIN leaving l ON c.unit = l.unit "
        "ORDER BY at_s"
    )


def _window(records: Records, arm: str, own: Ints, first_s: Floats, share: Floats) -> Window:
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
    ((stopped_s,),) = records.rows(
        "SELECT min(started_s) FROM chosen WHERE arm = ? AND not_counted = 'stopped'", [arm]
    )
    return begin, end if stopped_s is None else min(end, float(np.nextafter(stopped_s, 0.0)))


def _crossed(records: Records) -> tuple[Crossed, ...]:
    rows = records.rows(
        "SELECT c.unit, list_sort(list(DISTINCT c.arm)), list_sort(list(DISTINCT file)), "
        "bool_or(c.arm = first_arm AND started_s > left_s) AS is_back "
        "FROM chosen c JOIN units u ON c.unit = u.unit JOIN leaving l ON c.unit = l.unit "
        "GROUP BY c.unit ORDER BY is_back DESC, c.unit"
    )
    return tuple(
        Crossed(unit=unit, arms=tuple(arms), files=tuple(files), is_back=is_back)
        for unit, arms, files, is_back in rows
    )


def _floats(column: Any) -> Floats:
    found: Floats = _masked.filled(_masked.asarray(column, dtype=float), np.nan)
    return found


def _ints(column: Any) -> Ints:
    found: Ints = _masked.filled(_masked.asarray(column), 0).astype(np.int64)
    return found


def _bools(column: Any) -> Bools:
    found: Bools = _masked.filled(_masked.asarray(column), False).astype(np.bool_)
    return found


def _shares(column: Any) -> Floats:
    """Return the shares; a value that is no share (0, above 1) weighs as 1."""
    shares = _floats(column)
    return np.where((shares > 0) & (shares <= 1), shares, 1.0)
