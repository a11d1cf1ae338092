"""Is the assignment sound? Unit counts, units in two variants, missing outcomes, a stopped variant.

`design_limits.py` has what a design cannot show, `surroundings.py` what records and fleet lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from loadtest.experiments.arms import ArmSummary
from loadtest.experiments.findings import Finding, broken, note, warning
from loadtest.experiments.metrics import unit_noun
from loadtest.experiments.observations import Observations
from loadtest.experiments.ratio_check import RatioCheck
from loadtest.statistics.effects import estimate, totals
from loadtest.words import moment, percent

_DISAGREEING: Final = 0.01  # of units; more is no accident of a changing share
_MISSING_Z: Final = 4.0  # standard errors; high, because people look repeatedly
_MISSING: Final = 0.01  # of requests; less does not matter
_BREAKS: Final = 0.05


def check_soundness(
    observations: Observations,
    arms: tuple[ArmSummary, ...],
    ratio: RatioCheck,
    baseline: str,
) -> Iterator[Finding]:
    """Yield findings about the assignment."""
    yield _ratio(observations, ratio)
    yield from _crossed(observations)
    yield from _missing(observations, arms, baseline)
    yield from _stopped(observations)


def _ratio(observations: Observations, ratio: RatioCheck) -> Finding:
    noun = unit_noun(observations.experiment.design, 2)
    counts = ", ".join(
        f"{arm} {ratio.seen[arm]:,} (expected {ratio.expected[arm]:,.0f})" for arm in ratio.seen
    )
    said = f"{noun} per variant: {counts}; p = {ratio.p_value:.2g}"
    if not ratio.is_broken:
        return note("sample_ratio", f"sample ratio as assigned: {said}")
    return broken(
        "sample_ratio",
        f"sample ratio: {said}. One variant loses {noun} (crashes, lost records, clients that "
        "retry elsewhere), so the rest of the variants is not comparable",
    )


def _crossed(observations: Observations) -> Iterator[Finding]:
    crossed = observations.crossed
    noun = unit_noun(observations.experiment.design, 2)
    back = [unit for unit in crossed if unit.is_back]
    if back:
        names = "; ".join(
            f"{unit.unit} in {' and '.join(unit.arms)} ({', '.join(unit.files)})"
            for unit in back[:3]
        )
        text = (
            f"routers disagree: {len(back):,} of {observations.num_units:,} {noun} changed between "
            f"variants and back: {names}. Do all routers have the same definition and seed?"
        )
        is_many = len(back) > _DISAGREEING * observations.num_units
        yield (broken if is_many else warning)("arms_disagree", text)
    if len(crossed) > len(back):
        yield note(
            "units_moved",
            f"{len(crossed) - len(back):,} {noun} changed their variant once: they count for the "
            "first one until then",
        )


def _missing(
    observations: Observations, arms: tuple[ArmSummary, ...], baseline: str
) -> Iterator[Finding]:
    """Compare the shares of requests without a first-token time, by units."""
    counted = observations.counted(observations.window())
    unit = observations.unit[counted]
    missing = (observations.denominators["ttft"][counted] <= 0).astype(float)
    sums = totals(unit, missing, observations.num_units)
    counts = totals(unit, None, observations.num_units)
    ratios = {arm.name: arm.missing_ratio for arm in arms}
    for name in ratios:
        if name == baseline:
            continue
        units, is_treated, _ = observations.pair(name, baseline)
        effect = estimate(sums[units], counts[units], is_treated, is_relative=False)
        difference = abs(ratios[name] - ratios[baseline])
        if difference < _MISSING or not abs(effect.value) > _MISSING_Z * effect.se:
            continue
        text = (
            f"missing outcomes differ: {percent(ratios[name])} of {name}'s requests have no "
            f"first-token time, {percent(ratios[baseline])} of {baseline}'s. Times are compared "
            "among requests that have one, which differ between the variants"
        )
        yield (broken if difference > _BREAKS else warning)("missing_outcomes", text)


def _stopped(observations: Observations) -> Iterator[Finding]:
    noun = unit_noun(observations.experiment.design, 2)
    for arm, (_, end_s) in zip(observations.arms, observations.windows, strict=True):
        if np.isfinite(end_s):
            yield warning(
                "arm_stopped",
                f"{arm} got no {noun} of its own after {moment(end_s)}. It is compared until then",
            )
