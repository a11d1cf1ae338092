"""A report: everything that is said about an experiment, as data.

What must live here: the shape of the JSON, and the order of work. What must not: how it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from msgspec import Struct

from loadtest.experiments import shadows as shadow_policies
from loadtest.experiments.arms import ArmSummary, summarize
from loadtest.experiments.bad_lines import RecordsError
from loadtest.experiments.design_limits import check_design
from loadtest.experiments.evidence import NUM_LOOKS, Evidence, Options, weigh
from loadtest.experiments.findings import Finding, note
from loadtest.experiments.metrics import METRICS
from loadtest.experiments.observations import Observations, observe
from loadtest.experiments.ratio_check import RatioCheck, check
from loadtest.experiments.records import Named, Progress, Records
from loadtest.experiments.shadows import ShadowSummary
from loadtest.experiments.soundness import check_soundness
from loadtest.experiments.surroundings import check_surroundings
from loadtest.experiments.trials import check_trials
from loadtest.experiments.verdict import Verdict, judge
from loadtest.statistics.sequence import Floats

SCHEMA: Final = "warmroute.report/1"

_BASELINES: Final = ("control", "baseline", "default")
_ORDER: Final = {"broken": 0, "warning": 1, "note": 2}


class Report(Struct, frozen=True, kw_only=True):
    """What `--json` writes. `experiment` None: the records know of none, only shadows are reported.

    Shares and relative differences are fractions of 1, times of day unix seconds.
    """

    schema: str = SCHEMA
    files: tuple[str, ...]
    num_records: int
    experiments: tuple[Named, ...]  # all that the records know
    experiment: Named | None
    baseline: str | None
    options: Options
    begin_s: float | None
    end_s: float | None
    num_units: int
    num_requests: int  # of the experiment
    num_counted: int
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]  # the worst first
    sample_ratio: RatioCheck | None
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[Evidence, ...]
    shadows: tuple[ShadowSummary, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing says that the numbers must not be believed."""
        return all(finding.weight != "broken" for finding in self.findings)


class Times(Struct, frozen=True, kw_only=True):
    """First-token times that count, for pictures: values in ms, and weights."""

    by_arm: dict[str, tuple[Floats, Floats]]


def make_report(
    records: Records,
    *,
    name: str | None = None,
    trials: Sequence[str] = (),
    baseline: str | None = None,
    options: Options | None = None,
    progress: Progress = lambda what, share: None,
) -> tuple[Report, Times]:
    """Report on an experiment.

    Args:
        records: See `records.load`.
        name: The experiment; None: the only one there is.
        trials: Ids of its starts, which count as one experiment; none: the newest only.
        baseline: The arm that others are held against; None: the control arm of the definition.
            Where records do not name it: the one called control, baseline or default, else the
            first by name.
        options: What is asked.
        progress: Called with what is being done, and the share of it that is.

    Raises:
        RecordsError: no such experiment or arm, or not clear which.
        MissingExtra: scipy is not installed.
    """
    options = options or Options()
    experiment = records.choose(name, trials)
    shadows = shadow_policies.summarize(records)
    if experiment is None:
        return _without_experiment(records, shadows, options), Times(by_arm={})
    chosen = _baseline(experiment, baseline)
    progress("fetching requests", 0.0)
    observations = observe(records, experiment)
    num_steps = len(experiment.arms) * len(METRICS) + (len(experiment.arms) - 1) * NUM_LOOKS
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("comparing variants", done / num_steps)

    arms = summarize(records, observations, chosen, advance=advance)
    others = [arm for arm in experiment.arms if arm != chosen]
    comparisons = tuple(
        weigh(
            observations, arm, chosen, options, alpha=options.alpha / len(others), advance=advance
        )
        for arm in others
    )
    ratio = check(observations)
    findings = _findings(records, observations, arms, comparisons, ratio, chosen, baseline, others)
    begin_s, end_s = float(observations.at_s[0]), float(observations.at_s[-1])
    report = Report(
        files=records.files,
        num_records=records.num_records,
        experiments=records.experiments,
        experiment=experiment,
        baseline=chosen,
        options=options,
        begin_s=begin_s,
        end_s=end_s,
        num_units=observations.num_units,
        num_requests=len(observations.at_s),
        num_counted=sum(arm.num_counted for arm in arms),
        verdicts=tuple(judge(c, findings, experiment.design, options) for c in comparisons),
        findings=findings,
        sample_ratio=ratio,
        arms=arms,
        comparisons=comparisons,
        shadows=shadows,
    )
    return report, _times(observations)


def _without_experiment(
    records: Records, shadows: tuple[ShadowSummary, ...], options: Options
) -> Report:
    findings = [note("no_experiment", "no record is of an experiment; shadows are all there is")]
    if not shadows:
        findings = [
            note("no_experiment", "no record is of an experiment, and none has shadow decisions")
        ]
    return Report(
        files=records.files,
        num_records=records.num_records,
        experiments=(),
        experiment=None,
        baseline=None,
        options=options,
        begin_s=None,
        end_s=None,
        num_units=0,
        num_requests=0,
        num_counted=0,
        verdicts=(),
        findings=(*findings, *check_surroundings(records, ())),
        sample_ratio=None,
        arms=(),
        comparisons=(),
        shadows=shadows,
    )


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
    wanted: str | None,
    others: list[str],
) -> tuple[Finding, ...]:
    found = [
        *check_soundness(records, observations, arms, ratio, baseline),
        *check_design(records, observations, arms, comparisons),
        *check_surroundings(records, arms),
        *check_trials(observations.experiment, records.trials(observations.experiment.name)),
    ]
    if wanted is None and baseline not in (observations.experiment.control, *_BASELINES):
        found.append(note("baseline", f"compared with {baseline}; --baseline NAME chooses another"))
    if len(others) > 1:
        found.append(
            note(
                "several_arms",
                f"{len(others)} variants are compared: each at a level of alpha / {len(others)}, "
                "so that all verdicts together are wrong as seldom as was asked",
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
