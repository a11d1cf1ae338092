"""Is the assignment sound: ratio of units, units in two variants, missing outcomes, a variant that
ended.

What must live here: what can make the variants unlike before any policy acted. What the design
itself cannot carry is in `design_limits.py`, what the records and the fleet lack in
`surroundings.py`.
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
from loadtest.experiments.records import Records
from loadtest.statistics.effects import estimate, totals
from loadtest.words import moment, percent

_DISAGREEING: Final = 0.01  # of units; more is no accident of a changing share
_MISSING_Z: Final = 4.0  # standard errors: looked at often, and never by chance
_MISSING: Final = 0.01  # of requests; less does not matter
_BREAKS: Final = 0.05
_BY_WHOM: Final = "by a guardrail or by hand?"  # if others placed them, their records have it


def check_soundness(
    records: Records,
    observations: Observations,
    arms: tuple[ArmSummary, ...],
    ratio: RatioCheck,
    baseline: str,
) -> Iterator[Finding]:
    """Yield what is found, the worst first."""
    yield from _ratio(observations, ratio)
    yield from _crossed(observations)
    yield from _missing(observations, arms, baseline)
    yield from _not_counted(records)
    yield from _window(records, observations)
    yield from _shares(observations)


def _ratio(observations: Observations, ratio: RatioCheck) -> Iterator[Finding]:
    noun = unit_noun(observations.experiment.design, 2)
    counts = ", ".join(
        f"{arm} {ratio.seen[arm]:,} (expected {ratio.expected[arm]:,.0f})" for arm in ratio.seen
    )
    said = (
        f"{noun} per variant: {counts}; p = {ratio.p_sequential:.2g} at every look, "
        f"{ratio.p_once:.2g} at one"
    )
    if not ratio.is_broken:
        yield note("sample_ratio", f"sample ratio as assigned: {said}")
    elif observations.experiment.design == "switchback":
        yield broken(
            "sample_ratio",
            f"the slot schedule is unbalanced: {said}. Slots without traffic or records, or "
            "routers with different schedules",
        )
    else:
        yield broken(
            "sample_ratio",
            f"sample ratio: {said}. One variant loses {noun} (crashes, lost records, clients that "
            "retry elsewhere), so the rest of the variants is not comparable",
        )


def _crossed(observations: Observations) -> Iterator[Finding]:
    crossed = observations.crossed
    if not crossed:
        return
    noun = unit_noun(observations.experiment.design, 2)
    back = [unit for unit in crossed if unit.is_back]
    if back:
        names = "; ".join(
            f"{unit.unit} in {' and '.join(unit.arms)} ({', '.join(unit.files)})"
            for unit in back[:3]
        )
        text = (
            f"routers disagree: {len(back):,} of {observations.num_units:,} {noun} went to and fro "
            f"between variants: {names}. Do all routers have the same definition, shares and seed?"
        )
        is_many = len(back) > _DISAGREEING * observations.num_units
        yield (broken if is_many else warning)("arms_disagree", text)
    if len(crossed) > len(back):
        example = next(unit for unit in crossed if not unit.is_back)
        yield note(
            "units_moved",
            f"{len(crossed) - len(back):,} {noun} changed their variant once, such as "
            f"{example.unit} ({' and '.join(example.arms)}): counted in the first one until then",
        )


def _missing(
    observations: Observations, arms: tuple[ArmSummary, ...], baseline: str
) -> Iterator[Finding]:
    """Compare by arm how often a first-token time is missing, with units as they vary."""
    counted = observations.counted(observations.window())
    unit = observations.unit[counted]
    missing = (observations.denominators["ttft"][counted] <= 0).astype(float)
    sums = totals(unit, missing, observations.num_units)
    counts = totals(unit, None, observations.num_units)
    by_name = {arm.name: arm for arm in arms}
    base = by_name[baseline]
    for index, name in enumerate(observations.arms):
        if name == baseline:
            continue
        pair = np.isin(observations.unit_arm, (index, observations.arms.index(baseline)))
        effect = estimate(
            sums[pair], counts[pair], observations.unit_arm[pair] == index, is_relative=False
        )
        difference = abs(by_name[name].missing_ratio - base.missing_ratio)
        if difference < _MISSING or not abs(effect.value) > _MISSING_Z * effect.se:
            continue
        text = (
            f"missing outcomes differ: {percent(by_name[name].missing_ratio)} of {name}'s requests "
            f"have no first-token time, {percent(base.missing_ratio)} of {baseline}'s. Times are "
            "compared among those that have one, which then differ between variants"
        )
        yield (broken if difference > _BREAKS else warning)("missing_outcomes", text)


def _not_counted(records: Records) -> Iterator[Finding]:
    """Report what routers marked as not to be counted, beyond the wash-out that was planned."""
    rows = records.rows(
        "SELECT not_counted, arm, count(*), count(*) / any_value(num) FROM chosen JOIN "
        "(SELECT arm, count(*) AS num FROM chosen GROUP BY arm) USING (arm) "
        "WHERE not_counted NOT IN ('wash_out', 'stopped') GROUP BY 1, 2 ORDER BY 1, 2"
    )
    for reason, arm, count, share in rows:
        text = f"{count:,} of {arm}'s requests ({percent(share)}) do not count: {reason}"
        if reason == "beyond_partition" and share > _MISSING:
            yield warning(
                reason,
                f"{text}. Its own replicas were all out; to leave such moments out flatters it",
            )
        else:
            yield note(reason, text)


def _window(records: Records, observations: Observations) -> Iterator[Finding]:
    noun = unit_noun(observations.experiment.design, 2)
    reasons = dict(
        records.rows(
            "SELECT arm, arg_min(stop_reason, started_s) FROM chosen "
            "WHERE stop_reason IS NOT NULL GROUP BY arm"
        )
    )
    for arm, (begin_s, end_s) in zip(observations.arms, observations.windows, strict=True):
        if np.isfinite(end_s):
            said = f"stopped ({reasons[arm]})." if arm in reasons else f"stopped, {_BY_WHOM}"
            yield warning(
                "arm_stopped",
                f"{arm} got no {noun} of its own after {moment(end_s)}: {said} "
                "It is compared until then. What it would have done to the rest is "
                "unknown: a variant that is stopped for being bad is not a fair sample of being "
                "good",
            )
        if np.isfinite(begin_s):
            yield note("arm_late", f"{arm} is compared from {moment(begin_s)} on, when it began")


def _shares(observations: Observations) -> Iterator[Finding]:
    changes = sum(len(np.unique(share)) > 1 for _, share in observations.shares)
    if changes:
        yield note(
            "ramp",
            "shares changed on the way: every request is weighted by 1 / (its variant's share "
            "then), so that no variant stands for other hours than the other",
        )
