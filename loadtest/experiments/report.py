"""A report: everything about an experiment, as data. This module has the shape of the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from msgspec import Struct

from loadtest.experiments.arms import ArmSummary, summarize
from loadtest.experiments.design_limits import check_design
from loadtest.experiments.evidence import Evidence, Options, weigh
from loadtest.experiments.findings import Finding, note
from loadtest.experiments.observations import Observations, observe
from loadtest.experiments.ratio_check import RatioCheck, check
from loadtest.experiments.records import Named, Records, RecordsError
from loadtest.experiments.soundness import check_soundness
from loadtest.experiments.surroundings import check_surroundings, check_trials
from loadtest.experiments.verdict import Verdict, judge
from loadtest.statistics.effects import Floats

SCHEMA: Final = "warmroute.report/1"

_BASELINES: Final = ("control", "baseline", "default")
_ORDER: Final = {"broken": 0, "warning": 1, "note": 2}


class Report(Struct, frozen=True, kw_only=True):
    """The content of `--json`.

    Shares and relative differences are fractions of 1, times are unix seconds.
    """

    schema: str = SCHEMA
    files: tuple[str, ...]
    num_records: int
    options: Options
    findings: tuple[Finding, ...]  # the worst first
    experiments: tuple[Named, ...] = ()  # all in the records
    experiment: Named | None = None
    baseline: str | None = None
    begin_s: float | None = None
    end_s: float | None = None
    num_units: int = 0
    num_requests: int = 0  # of the experiment
    num_counted: int = 0
    verdicts: tuple[Verdict, ...] = ()
    sample_ratio: RatioCheck | None = None
    arms: tuple[ArmSummary, ...] = ()
    comparisons: tuple[Evidence, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Return whether no finding breaks the experiment."""
        return all(finding.weight != "broken" for finding in self.findings)


class Times(Struct, frozen=True, kw_only=True):
    """First-token times of counted requests, for pictures: values in ms, and weights."""

    by_arm: dict[str, tuple[Floats, Floats]]


def make_report(
    records: Records,
    *,
    name: str | None = None,
    trials: Sequence[str] = (),
    baseline: str | None = None,
    options: Options | None = None,
) -> tuple[Report, Times]:
    """Report on an experiment.

    Args:
        records: See `records.load`.
        name: The experiment; None: the only one.
        trials: Ids of its starts, joined as one experiment; none: only the newest.
        baseline: The variant that others are compared with; None: the control of the definition.
            If records do not name it: a variant called control, baseline or default, else the
            first by name.
        options: The question.

    Raises:
        RecordsError: the experiment or variant is unknown or ambiguous.
        MissingExtra: scipy is not installed.
    """
    options = options or Options()
    experiment = records.choose(name, trials)
    if experiment is None:
        raise RecordsError(f"{records.num_records:,} records, and none is of an experiment")
    chosen = _baseline(experiment, baseline)
    observations = observe(records, experiment)
    arms = summarize(observations, chosen)
    others = [arm for arm in experiment.arms if arm != chosen]
    comparisons = tuple(
        weigh(observations, arm, chosen, options, alpha=options.alpha / len(others))
        for arm in others
    )
    ratio = check(observations)
    findings = _findings(records, observations, arms, comparisons, ratio, chosen)
    report = Report(
        files=records.files,
        num_records=records.num_records,
        experiments=records.experiments,
        experiment=experiment,
        baseline=chosen,
        options=options,
        begin_s=float(observations.at_s[0]),
        end_s=float(observations.at_s[-1]),
        num_units=observations.num_units,
        num_requests=len(observations.at_s),
        num_counted=sum(arm.num_counted for arm in arms),
        verdicts=tuple(judge(c, findings, experiment.design, options) for c in comparisons),
        findings=findings,
        sample_ratio=ratio,
        arms=arms,
        comparisons=comparisons,
    )
    return report, _times(observations)


def _baseline(experiment: Named, wanted: str | None) -> str:
    arms = experiment.arms
    if len(arms) < 2:
        raise RecordsError(
            f"experiment {experiment.name!r}: all records are of one variant, {', '.join(arms)}; "
            "there is nothing to compare it with (are the other routers' files here?)"
        )
    if wanted is None:
        return next((name for name in (experiment.control, *_BASELINES) if name in arms), arms[0])
    if wanted not in arms:
        near = get_close_matches(wanted, arms, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise RecordsError(
            f"experiment {experiment.name!r} has no variant {wanted!r}{meant} (variants: "
            f"{', '.join(arms)})"
        )
    return wanted


def _findings(
    records: Records,
    observations: Observations,
    arms: tuple[ArmSummary, ...],
    comparisons: tuple[Evidence, ...],
    ratio: RatioCheck,
    baseline: str,
) -> tuple[Finding, ...]:
    experiment = observations.experiment
    found = [
        *check_soundness(observations, arms, ratio, baseline),
        *check_design(observations, arms, comparisons),
        *check_surroundings(records, observations, arms),
        *check_trials(experiment, records.trials(experiment.name)),
    ]
    if len(comparisons) > 1:
        found.append(
            note(
                "several_arms",
                f"{len(comparisons)} variants are compared, each at a level of alpha / "
                f"{len(comparisons)}, so that alpha holds for all verdicts together",
            )
        )
    outside = records.num_records - len(observations.at_s)
    if outside:
        found.append(note("outside", f"{outside:,} records are not of this experiment"))
    return tuple(sorted(found, key=lambda finding: _ORDER[finding.weight]))


def _times(observations: Observations) -> Times:
    counted = observations.counted(observations.window())
    has = counted & (observations.denominators["ttft"] > 0)
    arm = observations.unit_arm[observations.unit]
    return Times(
        by_arm={
            name: (
                observations.numerators["ttft"][has & (arm == index)],
                observations.weight[has & (arm == index)],
            )
            for index, name in enumerate(observations.arms)
        }
    )
