"""A report in plain words: its answer, its doubts, what it cannot say."""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.compare.arms import Arm
from loadtest.compare.report import ArmFigures, Report
from loadtest.compare.setting import PLACES
from loadtest.statistics import Comparison

_LEADING = ("mean TTFT", "recomputed tokens", "within SLO")


def lead(report: Report) -> str:
    """Answer in a few sentences: each arm against the baseline, by mean first-token time."""
    baseline = report.setting.baseline
    found = [c for c in report.comparisons if c.measure == "mean TTFT"]
    if not found:
        return f"Nothing can be compared with {baseline}: no turn succeeded in two arms."
    return f"Mean time to first token against {baseline}: " + "; ".join(map(_clause, found)) + "."


def paragraphs(report: Report) -> list[str]:
    """Say how each arm did against the baseline, one paragraph per arm."""
    said: dict[str, list[str]] = {}
    for found in report.comparisons:
        if found.measure in _LEADING:
            said.setdefault(found.arm, []).append(_sentence(found))
    return [
        f"{arm} against {report.setting.baseline}: {'; '.join(parts)}."
        for arm, parts in said.items()
    ]


def doubts(report: Report) -> list[str]:
    """Say what limits these figures: what is missing, what is not compared, which checks warn."""
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
        said.append(
            f"{len(warned)} of {len(report.checks)} checks warn, see below: {', '.join(warned)}."
        )
    return said


def limits(report: Report) -> list[str]:
    """Say what no report of this kind can know."""
    said = [
        "Intervals are of 95 % each: the hull of what drawing sessions anew gives and of how far "
        "rounds differ. With many measures and arms, some will look different that are not.",
        "Each arm had the fleet to itself. What two policies would do to each other in one fleet "
        "is another question (see docs/compare.md).",
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
    """Say what was run, line by line."""
    setting = report.setting
    lines = [
        f"workload: {setting.workload}"
        + (f", {setting.num_turns:,} turns" if setting.num_turns is not None else ""),
        f"where: {PLACES[setting.place]}",
        f"arms: {', '.join(_describe_arms(setting.arms))}; baseline {setting.baseline}",
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


def _sentence(found: Comparison) -> str:
    name = f"{found.measure} {effect(found)} ({bounds(found)}"
    if len(found.rounds) > 1:
        name += f"; rounds {round_range(found)}"
    match found.verdict:
        case "blurred":
            return f"{name}; no verdict, {found.blurred})"
        case verdict:
            return f"{name}), {verdict}"


def effect(found: Comparison) -> str:
    """Write a ratio as × 0.83, a difference of times with its sign and unit."""
    return _write(found, found.effect)


def bounds(found: Comparison) -> str:
    """Write the interval."""
    return f"{_write(found, found.low, bare=True)} to {_write(found, found.high, bare=True)}"


def figures(found: Comparison) -> tuple[str, ...]:
    """Write a comparison's cells: theirs, ours, effect, interval, range over the rounds."""
    return (
        value(found.unit, found.theirs),
        value(found.unit, found.ours),
        effect(found),
        bounds(found),
        round_range(found) if len(found.rounds) > 1 else "-",
    )


def round_range(found: Comparison) -> str:
    """Write the lowest and the highest of the rounds."""
    ends = (min(found.rounds), max(found.rounds))
    return " to ".join(_write(found, end, bare=True) for end in ends)


def value(measure_unit: str, amount: float | None) -> str:
    """Write a figure of an arm with its unit; `-` for none."""
    if amount is None:
        return "-"
    match measure_unit:
        case "s":
            return f"{amount:,.2f} s" if amount >= 10 else f"{_three(amount * 1e3)} ms"
        case "share":
            return f"{amount:.1%}"
        case _:
            return f"{amount:,.0f}"


def hit_ratio(arm: ArmFigures) -> float | None:
    """Cached tokens among prompt tokens; None: engines did not tell."""
    return 1 - arm.origin.recomputed / arm.origin.total if arm.origin.total else None


def _write(found: Comparison, amount: float, *, bare: bool = False) -> str:
    if found.kind == "ratio" and amount >= 1000:
        return "> 1,000"
    if found.kind == "ratio":
        return f"{amount:.2f}" if bare else f"× {amount:.2f}"
    sign = "+" if amount > 0 else "−" if amount < 0 else "±"
    size = abs(amount)
    if max(abs(found.low), abs(found.high), abs(found.effect)) >= 10:
        return f"{sign}{size:,.2f}" + ("" if bare else " s")
    return f"{sign}{_three(size * 1e3)}" + ("" if bare else " ms")


def _three(amount: float) -> str:
    """Write three digits that count."""
    if amount >= 100 or amount == 0:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if amount >= 10 else f"{amount:.2f}"
