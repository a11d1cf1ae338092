"""What a design cannot carry, however well it was run: said with the direction of the bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from loadtest.experiments.arms import ArmSummary
from loadtest.experiments.evidence import Evidence
from loadtest.experiments.findings import Finding, note, warning
from loadtest.experiments.metrics import METRICS, unit_noun
from loadtest.experiments.observations import Observations
from loadtest.experiments.records import Records
from loadtest.statistics.effects import MIN_UNITS, estimate, totals
from loadtest.words import percent, time_span

_FEW_SESSIONS: Final = 100
_FEW_SLOTS: Final = 40
_FEW_EFFECTIVE: Final = 30.0
_LONG_SLOT: Final = 10.0  # times the total time of nine requests in ten
_TREND_Z: Final = 3.0
_UNEQUAL: Final = 0.1


def check_design(
    records: Records,
    observations: Observations,
    arms: tuple[ArmSummary, ...],
    comparisons: tuple[Evidence, ...],
) -> Iterator[Finding]:
    """Yield what the design does not carry."""
    yield from _few(observations, comparisons)
    match observations.experiment.design:
        case "split":
            yield from _shared_replicas(arms)
        case "switchback":
            yield from _slots(records, observations)
        case "partition":
            yield from _partition(records, arms)
        case design:
            yield warning("design", f"design {design!r} is unknown here; judged as a split")
    yield from _trend(observations, comparisons)


def _few(observations: Observations, comparisons: tuple[Evidence, ...]) -> Iterator[Finding]:
    design = observations.experiment.design
    noun = unit_noun(design, 2)
    arms = observations.unit_arm[np.unique(observations.unit[observations.counts])]
    counts = np.bincount(arms, minlength=len(observations.arms))
    least = int(counts.min())
    enough = _FEW_SLOTS if design == "switchback" else _FEW_SESSIONS
    if least < MIN_UNITS:
        yield warning(
            "few_units",
            f"{least} {noun} in a variant: below {MIN_UNITS} nothing is decided, whatever the "
            "numbers",
        )
    elif least < enough:
        yield warning(
            "few_units",
            f"few {noun} ({least} in a variant): their spread is poorly known, intervals are wide",
        )
    for evidence in comparisons:
        effective = evidence.num_effective_units
        if evidence.num_units > 2 * MIN_UNITS and effective < min(
            _FEW_EFFECTIVE, 0.5 * evidence.num_units
        ):
            yield warning(
                "dominated",
                f"a few {noun} dominate: {evidence.num_units:,} of them weigh like "
                f"{effective:,.0f} of one size",
            )
            break
    total = len(observations.unit)
    if design != "switchback" and total and observations.num_units > 0.95 * total > 50:
        yield warning(
            "no_sessions",
            "nearly every session has one request: do clients send a session id? Without one, "
            "turns of one agent may be in both variants",
        )


def _shared_replicas(arms: tuple[ArmSummary, ...]) -> Iterator[Finding]:
    shared = set(arms[0].candidates).intersection(*(arm.candidates for arm in arms[1:]))
    if not shared:
        return
    yield warning(
        "interference",
        f"the variants share {len(shared)} replicas, their caches and queues: each waits behind "
        "the work that the other causes, and reuses what the other computed. What one policy saves "
        "or wastes affects both. The difference shown is usually smaller than that of two fleets, "
        "one under each policy (bias towards no difference). A policy that profits from the "
        "other's caches or idle replicas may even look better than it is. For the size of the "
        "effect use switchback or partition",
    )


def _slots(records: Records, observations: Observations) -> Iterator[Finding]:
    (slot_s,) = records.rows("SELECT median(started_s / (slot + 0.5)) FROM chosen WHERE slot > 0")[
        0
    ]
    (total_s,) = records.rows("SELECT quantile_cont(total_ms, 0.9) / 1000 FROM chosen")[0]
    if not np.any(observations.is_wash_out):
        yield warning(
            "no_wash_out",
            "no wash-out: the first requests of a slot meet the caches and queues of the other "
            "variant, which makes the variants look similar (bias towards no difference)",
        )
    else:
        share = float(np.mean(observations.is_wash_out))
        yield note("wash_out", f"{percent(share)} of requests are wash-out and do not count")
    if slot_s is not None and total_s is not None and slot_s < _LONG_SLOT * total_s:
        yield warning(
            "short_slots",
            f"slots of {time_span(slot_s)} are short: one request in ten takes longer than "
            f"{time_span(total_s)}, so much of a slot runs beside the other variant's work (bias "
            "towards no difference). Make them at least ten times as long",
        )
    if observations.blocks() is not None:
        yield note(
            "paired_slots",
            "each two slots in a row have both variants: pairs are compared, and what the hour "
            "does to both cancels",
        )
    if slot_s is not None and len(observations.arms) == 2:
        yield from _carry_over(observations, float(slot_s))


def _carry_over(observations: Observations, slot_s: float) -> Iterator[Finding]:
    """Compare the effect early in slots with that late in them."""
    started_s = observations.at_s  # ends will do: both halves are shifted alike
    is_late = started_s % slot_s > slot_s / 2
    counted = observations.counted(observations.window())
    halves = []
    for half in (~is_late, is_late):
        chosen = counted & half & (observations.denominators["ttft"] > 0)
        unit, weight = observations.unit[chosen], observations.weight[chosen]
        weighted = weight * observations.numerators["ttft"][chosen]
        sums = totals(unit, weighted, observations.num_units)
        counts = totals(unit, weight, observations.num_units)
        halves.append(estimate(sums, counts, observations.unit_arm == 1))
    early, late = halves
    gap = float(late.value - early.value)
    if abs(gap) > _TREND_Z * float(np.hypot(early.se, late.se)):
        yield warning(
            "carry_over",
            f"within slots the difference changes: a ratio of {np.exp(early.value):.2f} in their "
            f"first half, {np.exp(late.value):.2f} in their second. The other variant's caches "
            "still count: make the wash-out longer",
        )


def _partition(records: Records, arms: tuple[ArmSummary, ...]) -> Iterator[Finding]:
    sizes = ", ".join(f"{arm.name} {len(arm.candidates)}" for arm in arms)
    speeds = {
        arm: float(speed)
        for arm, speed in records.rows(
            "SELECT arm, median(chosen.cost.ms_per_token) FROM chosen GROUP BY arm"
        )
        if speed
    }
    if len({len(arm.candidates) for arm in arms}) > 1:
        yield warning(
            "unequal_replicas",
            f"partition with unequal replicas ({sizes}): load per replica differs with the share, "
            "too. The variant with fewer replicas for its share looks slower than its policy is",
        )
    if speeds and max(speeds.values()) > (1 + _UNEQUAL) * min(speeds.values()):
        listed = ", ".join(f"{arm} {speed:.3g}" for arm, speed in sorted(speeds.items()))
        yield warning(
            "unequal_speeds",
            f"partition with unequal replicas: learned prefill times differ (ms per token: "
            f"{listed}). The faster machines' variant looks better than its policy is",
        )
    yield warning(
        "few_replicas",
        f"partition ({sizes} replicas): sessions are resampled, replicas are not. A slow machine "
        "is an effect of its variant here, and is in no interval; swap the halves and run it again",
    )


def _trend(observations: Observations, comparisons: tuple[Evidence, ...]) -> Iterator[Finding]:
    """Compare the effect in the earlier half of the units with the later one."""
    for evidence in comparisons:
        metric = METRICS[evidence.metric]
        pair = [
            observations.arms.index(evidence.baseline),
            observations.arms.index(evidence.arm),
        ]
        counted = observations.counted(observations.window(evidence.arm, evidence.baseline))
        sums, counts = observations.sums(metric.name, counted)
        units = np.flatnonzero(np.isin(observations.unit_arm, pair) & (counts > 0))
        if len(units) < 4 * MIN_UNITS:
            continue
        early, late = (
            estimate(
                sums[half],
                counts[half],
                observations.unit_arm[half] == pair[1],
                is_relative=metric.is_relative,
            )
            for half in np.array_split(units, 2)
        )
        if abs(late.value - early.value) > _TREND_Z * np.hypot(early.se, late.se):
            first, last = (
                float(np.expm1(e.value) if metric.is_relative else e.value) for e in (early, late)
            )
            yield warning(
                "trend",
                f"the difference of {evidence.arm} changes with time: {percent(first)} in the "
                f"first half, {percent(last)} in the second. Caches that were still cold, or "
                "another load: the mean of both describes neither",
            )
