"""A report's answer, what limits it, and what no report can answer, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.compare.arms import Arm
from loadtest.compare.report import ArmFigures, Report
from loadtest.compare.setting import PLACES
from loadtest.statistics import Comparison, words
from loadtest.statistics.words import bounds

_LEADING = ("mean TTFT", "mean session", "computed tokens", "within SLO")


def lead(report: Report) -> str:
    """Answer in a few sentences: each variant against the baseline, by mean first-token time."""
    baseline = report.setting.baseline
    found = [c for c in report.comparisons if c.measure == "mean TTFT"]
    if not found:
        return f"Nothing can be compared with {baseline}: no turn succeeded in two variants."
    return f"Mean time to first token against {baseline}: " + "; ".join(map(_clause, found)) + "."


def paragraphs(report: Report) -> list[str]:
    """Compare each variant with the baseline, one paragraph each."""
    return words.paragraphs(found for found in report.comparisons if found.measure in _LEADING)


def caveats(report: Report) -> list[str]:
    """List what limits these figures: what is missing, what is not compared, which checks warn."""
    said = []
    if not report.is_complete:
        said.append(f"Not complete. {report.note}.")
    left_out = [c for c in report.comparisons if c.measure == "mean TTFT" and c.num_left_out]
    said += [
        f"{c.arm} and {c.baseline} are compared over the {c.num_turns:,} turns that succeeded in "
        f"both; {c.num_left_out:,} others are not compared."
        for c in left_out
    ]
    warned = [check.name for check in report.checks if check.outcome == "warned"]
    if warned:
        said.append(f"{len(warned)} of {len(report.checks)} checks warn: {', '.join(warned)}.")
    return said


def limits(report: Report) -> list[str]:
    """List what no report of this kind can know."""
    said = [
        "Intervals are of 95 % each. Each covers both the intervals from resampled sessions and "
        "the differences between rounds. With many measures and variants, some will look different "
        "that are not.",
        "Each variant had the fleet to itself. What two policies would do to each other in one "
        "fleet is another question (see docs/evaluate/compare.md).",
    ]
    match report.setting.place:
        case "simulated":
            said.append(
                "Simulated: times are those of an engine model, not of engines. Rounds differ by "
                "what must not matter alone: seed, bytes, a millisecond."
            )
        case "emulated":
            said.append(
                "Replicas are emulated: their times are modelled, router and driver are real and "
                "share this machine with them."
            )
        case _:
            pass
    return said


def describe(report: Report) -> list[str]:
    """Describe what was run, line by line."""
    setting = report.setting
    lines = [
        f"workload: {setting.workload}, {setting.num_turns:,} turns",
        f"where: {PLACES[setting.place]}",
        f"variants: {', '.join(_describe_arms(setting.arms))}; baseline {setting.baseline}",
        f"order: {' | '.join(' '.join(labels) for labels in setting.order)}; seed {setting.seed}",
    ]
    if setting.details:
        lines.append(", ".join(f"{key} {value}" for key, value in setting.details.items()))
    return lines


def _describe_arms(arms: Iterable[Arm]) -> Iterable[str]:
    for arm in arms:
        yield f"{arm.label} ({arm.url})" if arm.url not in (None, arm.label) else arm.label


def _clause(found: Comparison) -> str:
    match found.verdict:
        case "within the spread":
            return f"{found.arm} does not differ by more than the spread (× {found.effect:.2f})"
        case "blurred":
            return f"{found.arm} × {found.effect:.2f}, no verdict ({found.blurred})"
        case verdict:
            much = f"{abs(found.effect - 1):.1%} {verdict}"
            if found.effect >= 2:
                much = f"{found.effect:.2f} times as long"
            return f"{found.arm} takes {much} (95 %: × {bounds(found)})"


def hit_ratio(arm: ArmFigures) -> float | None:
    """Return cached tokens by prompt tokens; None: engines did not report them."""
    return 1 - arm.origin.computed / arm.origin.total if arm.origin.total else None
