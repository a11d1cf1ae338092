"""What a design cannot show even if it ran well, with the direction of the bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from loadtest.experiments.arms import ArmSummary
from loadtest.experiments.evidence import Evidence
from loadtest.experiments.findings import Finding, note, warning
from loadtest.experiments.metrics import unit_noun
from loadtest.experiments.observations import Observations
from loadtest.statistics.effects import MIN_UNITS
from loadtest.words import percent, time_span

_FEW_SESSIONS: Final = 100
_FEW_SLOTS: Final = 40
_FEW_EFFECTIVE: Final = 30.0
_LONG_SLOT: Final = 10.0  # times the total time that 90 % of the requests keep


def check_design(
    observations: Observations,
    arms: tuple[ArmSummary, ...],
    comparisons: tuple[Evidence, ...],
) -> Iterator[Finding]:
    """Yield the limits of the design."""
    design = observations.experiment.design
    yield from _few(observations, comparisons)
    if design == "split":
        yield from _shared_replicas(arms)
    elif design == "switchback":
        yield from _slots(observations)
    else:
        yield warning("design", f"design {design!r} is unknown here; it is judged as a split")


def _few(observations: Observations, comparisons: tuple[Evidence, ...]) -> Iterator[Finding]:
    design = observations.experiment.design
    noun = unit_noun(design, 2)
    arms = observations.unit_arm[np.unique(observations.unit[observations.counts])]
    least = int(np.bincount(arms, minlength=len(observations.arms)).min())
    if least < MIN_UNITS:
        text = f"{least} {noun} in a variant: nothing is decided below {MIN_UNITS}"
        yield warning("few_units", text)
    elif least < (_FEW_SLOTS if design == "switchback" else _FEW_SESSIONS):
        text = f"few {noun} ({least} in a variant): their spread is poorly known, bounds are wide"
        yield warning("few_units", text)
    for evidence in comparisons:
        effective = evidence.num_effective_units
        if evidence.num_units > 2 * MIN_UNITS and effective < min(
            _FEW_EFFECTIVE, 0.5 * evidence.num_units
        ):
            text = (
                f"a few {noun} dominate: {evidence.num_units:,} of them weigh like "
                f"{effective:,.0f} of one size"
            )
            yield warning("dominated", text)
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
    if shared:
        yield warning(
            "interference",
            f"the variants share {len(shared)} replicas, their caches and queues, so what one "
            "policy saves or wastes affects both. The difference shown is usually smaller than "
            "that of two fleets, one under each policy (bias towards no difference). For the size "
            "of the effect use switchback",
        )


def _slots(observations: Observations) -> Iterator[Finding]:
    slot_s = np.median(
        [
            each.started_s / (each.assignment.slot + 0.5)
            for each in observations.requests
            if each.assignment is not None and each.assignment.slot
        ]
    )
    total_s = float(np.quantile([each.total_ms for each in observations.requests], 0.9)) / 1000
    if not np.any(observations.is_wash_out):
        yield warning(
            "no_wash_out",
            "no wash-out: the first requests of a slot meet the caches and queues of the other "
            "variant, which makes the variants look similar (bias towards no difference)",
        )
    else:
        share = float(np.mean(observations.is_wash_out))
        yield note("wash_out", f"{percent(share)} of requests are wash-out and do not count")
    if slot_s < _LONG_SLOT * total_s:
        yield warning(
            "short_slots",
            f"slots of {time_span(float(slot_s))} are short: one request in ten takes longer than "
            f"{time_span(total_s)}, so much of a slot runs beside the other variant's work (bias "
            "towards no difference). Make them at least ten times as long",
        )
    if observations.blocks() is not None:
        yield note(
            "paired_slots",
            "each two slots in a row have both variants: pairs are compared, and the hour of the "
            "day cancels",
        )
