"""The figures of a comparison, from its runs: the content of `report.json`.

`schema` changes when a field changes its meaning; readers ignore fields they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from loadtest.compare.hygiene import Check, Setting, check, lateness, what_is_missing
from loadtest.machine import Machine, this_machine
from loadtest.results import Run, Summary, TurnResult, summarize
from loadtest.statistics import MEASURES, Comparison, Measure, Round, compare, is_good, within_slo
from loadtest.whole_sessions import SessionTimes, session_times

REPORT_SCHEMA: Final = "warmroute.compare/3"


class Origin(Struct, frozen=True, kw_only=True):
    """Tokens of the prompts of one variant, by where they came from.

    `unknown` were cached, as the engine reports, beyond what the router predicted.
    """

    num_turns: int
    gpu: int
    cpu: int
    pool: int
    unknown: int
    computed: int

    @property
    def total(self) -> int:
        """Count all prompt tokens."""
        return self.gpu + self.cpu + self.pool + self.unknown + self.computed


class RoundFigures(Struct, frozen=True, kw_only=True):
    """One run; figures are over all its turns that succeeded, in common or not."""

    round: int
    is_complete: bool
    note: str
    summary: Summary


class ArmFigures(Struct, frozen=True, kw_only=True):
    """One variant over all its runs.

    `good_share` of the turns kept the SLO, `good_per_s` did so in a second of a run; None: no
    SLO was stated. `prediction_exact_ratio`: turns whose cached tokens the router predicted to
    the token; None: it predicted none. `imbalance`: the busiest replica's computed tokens to the
    mean of all, on average over runs; None: answers do not name replicas.
    """

    label: str
    rounds: tuple[RoundFigures, ...]
    whole: Summary
    sessions: SessionTimes | None  # None: no session ended without a failure
    tbt_mean_s: float | None
    origin: Origin
    good_share: float | None
    good_per_s: float | None
    prediction_exact_ratio: float | None
    imbalance: float | None


class Report(Struct, frozen=True, kw_only=True):
    """A comparison in figures. `note`: why it is not complete."""

    schema: str = REPORT_SCHEMA
    setting: Setting
    is_complete: bool
    note: str
    arms: tuple[ArmFigures, ...]
    comparisons: tuple[Comparison, ...]
    checks: tuple[Check, ...]
    machine: Machine

    @property
    def num_errors(self) -> int:
        """Count the turns that failed, in all variants."""
        return sum(arm.whole.num_errors for arm in self.arms)


def make_report(
    runs: Sequence[Run],
    *,
    baseline: str,
    slo_ttft_s: float | None = None,
    slo_tbt_s: float | None = None,
) -> Report:
    """Compare every variant with the baseline, and check the figures.

    Args:
        runs: Of one workload; labels tell variants apart, and rounds tell a variant's runs apart.
    """
    labels = tuple(dict.fromkeys(run.info.label for run in runs))
    setting = Setting(
        workload=runs[0].info.workload,
        labels=labels,
        baseline=baseline,
        num_rounds=len({run.info.round for run in runs}),
        slo_ttft_s=slo_ttft_s,
        slo_tbt_s=slo_tbt_s,
    )
    comparisons = tuple(
        found
        for measure in _measures(setting)
        for label in labels
        if label != baseline
        if (found := _compare(measure, label, baseline, runs)) is not None
    )
    note = what_is_missing(setting, runs)
    return Report(
        setting=setting,
        is_complete=not note,
        note=note,
        arms=tuple(_arm(setting, label, runs) for label in labels),
        comparisons=comparisons,
        checks=check(setting, runs, comparisons),
        machine=this_machine(),
    )


def _measures(setting: Setting) -> list[Measure]:
    measures = list(MEASURES.values())
    if setting.has_slo:
        measures.append(within_slo(setting.slo_ttft_s, setting.slo_tbt_s))
    return measures


def _compare(measure: Measure, label: str, baseline: str, runs: Sequence[Run]) -> Comparison | None:
    by_key = {(run.info.label, run.info.round): run for run in runs}
    numbers = sorted({run.info.round for run in runs})
    both = [
        (by_key[label, number], by_key[baseline, number])
        for number in numbers
        if (label, number) in by_key and (baseline, number) in by_key
    ]
    return compare(
        measure,
        label,
        baseline,
        [
            Round(
                ours=ours.turns,
                theirs=theirs.turns,
                is_complete=ours.info.is_complete and theirs.info.is_complete,
            )
            for ours, theirs in both
        ],
        blurred=_blur(measure, both),
    )


def _blur(measure: Measure, both: Sequence[tuple[Run, Run]]) -> str:
    """Return why there can be no verdict; "": there can."""
    if len(both) < 2:
        return "a single round: how far a variant differs from itself is unknown"
    return lateness([run for pair in both for run in pair]) if measure.is_time else ""


def _arm(setting: Setting, label: str, runs: Sequence[Run]) -> ArmFigures:
    mine = [run for run in runs if run.info.label == label]
    counted = [[turn for turn in run.turns if not turn.is_warm_up] for run in mine]
    turns = [turn for part in counted for turn in part]
    summaries = [summarize(part) for part in counted]
    tbts = [turn.tbt_mean_s for turn in turns if turn.error is None and turn.tbt_mean_s is not None]
    predicted = [turn for turn in turns if turn.error is None and turn.predicted is not None]
    exact = [t for t in predicted if t.predicted and t.predicted.total == t.num_cached_tokens]
    balances = [
        imbalance(part) for part in counted if any(turn.replica is not None for turn in part)
    ]
    good = None
    if setting.has_slo:
        good = sum(is_good(turn, setting.slo_ttft_s, setting.slo_tbt_s) for turn in turns)
    span_s = sum(summary.span_s for summary in summaries)
    return ArmFigures(
        label=label,
        rounds=tuple(
            RoundFigures(
                round=run.info.round,
                is_complete=run.info.is_complete,
                note=run.info.note,
                summary=summary,
            )
            for run, summary in zip(mine, summaries, strict=True)
        ),
        whole=msgspec.structs.replace(summarize(turns), span_s=span_s),
        sessions=session_times(counted),
        tbt_mean_s=sum(tbts) / len(tbts) if tbts else None,
        origin=origin(turns),
        good_share=None if good is None or not turns else good / len(turns),
        good_per_s=None if good is None or not span_s else good / span_s,
        prediction_exact_ratio=len(exact) / len(predicted) if predicted else None,
        imbalance=sum(balances) / len(balances) if balances else None,
    )


def origin(turns: Iterable[TurnResult]) -> Origin:
    """Split the prompts: engines say how much was cached, the router in which tier.

    What neither reports is not guessed: turns without both token counts are left out, and
    cached tokens beyond the prediction are of unknown tier.
    """
    sums = dict.fromkeys(("gpu", "cpu", "pool", "unknown", "computed"), 0)
    num_turns = 0
    for turn in turns:
        if turn.error is not None or turn.is_warm_up:
            continue
        if turn.num_prompt_tokens is None or turn.num_cached_tokens is None:
            continue
        num_turns += 1
        left = turn.num_cached_tokens
        if turn.predicted is not None:
            for tier in ("gpu", "cpu", "pool"):
                from_tier = min(left, getattr(turn.predicted, tier))
                sums[tier] += from_tier
                left -= from_tier
        sums["unknown"] += left
        sums["computed"] += turn.num_computed_tokens
    return Origin(num_turns=num_turns, **sums)


def imbalance(turns: Iterable[TurnResult]) -> float:
    """Compare the replica that computed most prompt tokens with the mean; 1.0 is even.

    Requests are counted instead if engines do not report cached tokens.
    """
    known = [turn for turn in turns if turn.replica is not None and turn.error is None]
    is_known = all(turn.num_cached_tokens is not None for turn in known)
    work: dict[str, float] = {}
    for turn in known:
        assert turn.replica is not None
        part = float(turn.num_computed_tokens) if is_known else 1.0
        work[turn.replica] = work.get(turn.replica, 0.0) + part
    mean = sum(work.values()) / len(work) if work else 0.0
    return max(work.values()) / mean if mean else 1.0
