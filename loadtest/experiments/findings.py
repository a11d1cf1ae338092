"""What limits a report's claim, or breaks it.

In order: is the assignment sound? What can the design not show, with the direction of the bias?
What do the records and the fleet lack?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np
from msgspec import Struct

from loadtest.experiments.observations import Observations, assigned
from loadtest.experiments.records import Named, Records, Request
from loadtest.extras import need
from loadtest.statistics.effects import MIN_UNITS, Floats, estimate, num_effective, totals
from loadtest.words import moment, percent, time_span

Weight = Literal["broken", "warning", "note"]

RATIO_LEVEL: Final = 0.0005
"""Below this p of the sample ratio the experiment is called broken. It is low because people look
repeatedly. Source: Fabijan et al. 2019, "Diagnosing sample ratio mismatch"."""

_DISAGREEING: Final = 0.01  # of units
_MISSING_Z: Final = 4.0  # standard errors; high, because people look repeatedly
_MISSING: Final = 0.01  # of requests; less does not matter
_MISSING_BREAKS: Final = 0.05
_FEW_SESSIONS: Final = 100
_FEW_SLOTS: Final = 40
_FEW_EFFECTIVE: Final = 30.0
_LONG_SLOT: Final = 10.0  # times the total time that 90 % of the requests keep
_LOST: Final = 0.005  # of decisions
_UNKNOWN: Final = 0.05  # of requests
_OTHER_FLEET: Final = 0.01
_LISTED: Final = 5


class Finding(Struct, frozen=True, kw_only=True):
    """`broken`: do not trust any difference; `warning`: it may mislead; `note`: information."""

    weight: Weight
    code: str  # for machines: does not change
    text: str


class SampleRatio(Struct, frozen=True, kw_only=True):
    """Units seen and expected, by variant; `p_value` of Pearson's test."""

    seen: dict[str, int]
    expected: dict[str, float]
    p_value: float


def unit_noun(design: str, num: int = 2) -> str:
    """Return the word for what was randomised."""
    noun = "slot" if design == "switchback" else "session"
    return noun if num == 1 else f"{noun}s"


def sample_ratio(observations: Observations) -> SampleRatio:
    """Compare the units of each variant with its share."""
    arms = observations.arms
    seen = np.bincount(observations.unit_arm, minlength=len(arms)).astype(float)
    shares = {assigned(each).arm: assigned(each).share for each in observations.requests}
    share = np.array([shares[arm] for arm in arms])
    expected = seen.sum() * share / share.sum() if share.all() else seen
    return SampleRatio(
        seen=dict(zip(arms, seen.astype(int).tolist(), strict=True)),
        expected=dict(zip(arms, expected.tolist(), strict=True)),
        p_value=float(need("scipy.stats").chisquare(seen, expected).pvalue),
    )


def find(
    records: Records, observations: Observations, ratio: SampleRatio, counts: Floats
) -> tuple[Finding, ...]:
    """Return all findings, the worst first; `counts` are those of the units that decide."""
    order = {"broken": 0, "warning": 1, "note": 2}
    found = [
        *_soundness(observations, ratio),
        *_design(observations, counts),
        *_surroundings(records, observations),
        *_trials(observations.experiment, records.trials(observations.experiment.name)),
    ]
    return tuple(sorted(found, key=lambda finding: order[finding.weight]))


def _finding(weight: Weight, code: str, text: str) -> Finding:
    return Finding(weight=weight, code=code, text=text)


# -- the assignment ------------------------------------------------------------------------------


def _soundness(observations: Observations, ratio: SampleRatio) -> Iterator[Finding]:
    noun = unit_noun(observations.experiment.design)
    listed = ", ".join(
        f"{arm} {ratio.seen[arm]:,} (expected {ratio.expected[arm]:,.0f})" for arm in ratio.seen
    )
    said = f"{noun} per variant: {listed}; p = {ratio.p_value:.2g}"
    if ratio.p_value >= RATIO_LEVEL:
        yield _finding("note", "sample_ratio", f"sample ratio as assigned: {said}")
    else:
        yield _finding(
            "broken",
            "sample_ratio",
            f"sample ratio: {said}. One variant loses {noun} (crashes, lost records, clients that "
            "retry elsewhere), so the rest of the variants is not comparable",
        )
    crossed = observations.num_crossed
    if crossed:
        is_many = crossed > _DISAGREEING * observations.num_units
        yield _finding(
            "broken" if is_many else "warning",
            "arms_disagree",
            f"routers disagree: {crossed:,} of {observations.num_units:,} {noun} are in several "
            "variants. Do all routers have the same version?",
        )
    yield from _missing(observations)


def _missing(observations: Observations) -> Iterator[Finding]:
    """Compare the shares of requests without a first-token time, by units."""
    unit = observations.unit[observations.counts]
    missing = (observations.denominators["ttft"][observations.counts] <= 0).astype(float)
    sums = totals(unit, missing, observations.num_units)
    counts = totals(unit, None, observations.num_units)
    control = observations.arms[0]
    for arm in observations.arms[1:]:
        units, is_treated, _ = observations.pair(arm)
        effect = estimate(sums[units], counts[units], is_treated, is_relative=False)
        if not abs(effect.value) > max(_MISSING, _MISSING_Z * effect.se):
            continue
        own, other = (
            float(sums[units][which].sum() / counts[units][which].sum())
            for which in (is_treated, ~is_treated)
        )
        yield _finding(
            "broken" if abs(own - other) > _MISSING_BREAKS else "warning",
            "missing_outcomes",
            f"missing outcomes differ: {percent(own)} of {arm}'s requests have no first-token "
            f"time, {percent(other)} of {control}'s. Times are compared among requests that have "
            "one, which differ between the variants",
        )


# -- the design ----------------------------------------------------------------------------------


def _design(observations: Observations, counts: Floats) -> Iterator[Finding]:
    design, noun = observations.experiment.design, unit_noun(observations.experiment.design)
    arms = observations.unit_arm[np.unique(observations.unit[observations.counts])]
    least = int(np.bincount(arms, minlength=len(observations.arms)).min())
    if least < MIN_UNITS:
        text = f"{least} {noun} in a variant: nothing is decided below {MIN_UNITS}"
        yield _finding("warning", "few_units", text)
    elif least < (_FEW_SLOTS if design == "switchback" else _FEW_SESSIONS):
        text = f"few {noun} ({least} in a variant): their spread is poorly known, bounds are wide"
        yield _finding("warning", "few_units", text)
    num, effective = int(np.count_nonzero(counts)), num_effective(counts)
    if num > 2 * MIN_UNITS and effective < min(_FEW_EFFECTIVE, 0.5 * num):
        text = f"a few {noun} dominate: {num:,} of them weigh like {effective:,.0f} of one size"
        yield _finding("warning", "dominated", text)
    if design == "switchback":
        yield from _slots(observations)
        return
    total = len(observations.unit)
    if observations.num_units > 0.95 * total > 50:
        yield _finding(
            "warning",
            "no_sessions",
            "nearly every session has one request: do clients send a session id? Without one, "
            "turns of one agent may be in both variants",
        )
    used = [
        {each.candidate for each in observations.requests if assigned(each).arm == arm}
        for arm in observations.arms
    ]
    shared = set.intersection(*used)
    if shared:
        yield _finding(
            "warning",
            "interference",
            f"the variants share {len(shared)} replicas, their caches and queues, so what one "
            "policy saves or wastes affects both. The difference shown is usually smaller than "
            "that of two fleets, one under each policy (bias towards no difference). For the size "
            "of the effect use switchback",
        )


def _slots(observations: Observations) -> Iterator[Finding]:
    slots = [(each.started_s, assigned(each).slot or 0) for each in observations.requests]
    slot_s = float(np.median([at_s / (slot + 0.5) for at_s, slot in slots]))
    total_s = float(np.quantile([each.total_ms for each in observations.requests], 0.9)) / 1000
    share = 1 - float(np.mean(observations.counts))
    if share:
        text = f"{percent(share)} of requests are wash-out and do not count"
        yield _finding("note", "wash_out", text)
    else:
        yield _finding(
            "warning",
            "no_wash_out",
            "no wash-out: the first requests of a slot meet the caches and queues of the other "
            "variant, which makes the variants look similar (bias towards no difference)",
        )
    if slot_s < _LONG_SLOT * total_s:
        yield _finding(
            "warning",
            "short_slots",
            f"slots of {time_span(slot_s)} are short: one request in ten takes longer than "
            f"{time_span(total_s)}, so much of a slot runs beside the other variant's work (bias "
            "towards no difference). Make them at least ten times as long",
        )
    if observations.blocks() is not None:
        yield _finding(
            "note",
            "paired_slots",
            "each two slots in a row have both variants: pairs are compared, and the hour of the "
            "day cancels",
        )


# -- records and fleet ---------------------------------------------------------------------------


def _surroundings(records: Records, observations: Observations) -> Iterator[Finding]:
    if records.num_bad:
        named = "; ".join(str(line) for line in records.bad_lines[:3])
        yield _finding("note", "bad_lines", f"{records.num_bad:,} lines were left out: {named}")
    if records.num_twice:
        text = f"{records.num_twice:,} records were there twice; each is counted once"
        yield _finding("note", "twice", text)
    outside = len(records.requests) - len(observations.requests)
    if outside:
        text = f"{outside:,} records are not of this experiment"
        yield _finding("note", "outside", text)
    yield from _lost(records)
    for arm in observations.arms:
        own = Counter(each.state for each in observations.requests if assigned(each).arm == arm)
        for state, does in (("blind", "guessed"), ("degraded", "only partly known")):
            share = own[state] / own.total()
            if share > _UNKNOWN:
                yield _finding(
                    "warning",
                    f"{state}_decisions",
                    f"{percent(share)} of {arm}'s decisions were {state.upper()}: cache contents "
                    f"were {does}",
                )
    yield from _fleet(observations)


def _lost(records: Records) -> Iterator[Finding]:
    """Count the decisions that a router numbered and no record has.

    A router numbers its decisions of each model, retries included. Its seed identifies the process.
    """
    numbers: dict[tuple[int | None, str], list[Request]] = {}
    for each in records.requests:
        if each.number is not None:
            numbers.setdefault((each.seed, each.model), []).append(each)
    seen = lost = 0
    for own in numbers.values():
        given = {each.number for each in own if each.number is not None}
        if len(given) == len(own):  # else several processes have the same seed
            num_tries = sum(each.num_tries for each in own)
            seen += num_tries
            lost += max(0, max(given) - min(given) + 1 - num_tries)
    if lost > max(10, _LOST * (seen + lost)):
        yield _finding(
            "warning",
            "lost_records",
            f"about {lost:,} of {seen + lost:,} decisions have no record (numbers are "
            "missing): the disk was slow, or a file is missing. Routers count dropped records in "
            "warmroute_decision_records_dropped_total. Times are too good if slow moments lost "
            "more records",
        )


def _fleet(observations: Observations) -> Iterator[Finding]:
    """Compare the replicas that decisions could choose from, within each variant."""
    fleets: dict[str, Counter[str]] = {}
    for each in observations.requests:
        if each.fleet:
            fleets.setdefault(assigned(each).arm, Counter())[each.fleet] += 1
    total = sum(counts.total() for counts in fleets.values())
    usual = sum(max(counts.values()) for counts in fleets.values())
    names = {name for counts in fleets.values() for fleet in counts for name in fleet.split()}
    if total - usual > _OTHER_FLEET * total:
        yield _finding(
            "warning",
            "fleet_changed",
            f"the fleet changed: {percent((total - usual) / total)} of decisions had other replicas"
            f" to choose from than usual ({len(names)} in all). Replicas that come with cold "
            "caches, or go, move both variants, and not always equally",
        )


def _trials(chosen: Named, known: list[Named]) -> Iterator[Finding]:
    """Yield the other definitions of a name, the newest first."""
    left = [each for each in known if each.trial != chosen.trial]
    if left:
        listed = ", ".join(
            f"{each.trial} (from {moment(each.begin_s)}, {each.num_requests:,} requests)"
            for each in left[:_LISTED]
        )
        yield _finding(
            "note",
            "other_trials",
            f"this is trial {chosen.trial}, from {moment(chosen.begin_s)}. Other definitions of "
            f"the name are left out: {listed}. --trial ID chooses",
        )
    if any(each.begin_s < chosen.end_s and chosen.begin_s < each.end_s for each in left):
        yield _finding(
            "warning",
            "trials_overlap",
            "another definition of the name ran at the same time: routers read their files at "
            "different moments? Use start_at",
        )
