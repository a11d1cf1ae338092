"""A comparison in sentences and tables, on a terminal and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from rich.console import Console
from rich.text import Text

from loadtest.compare.hygiene import Outcome
from loadtest.compare.report import ArmFigures, Report
from loadtest.pages import Note, Page, Section, Table, Tone, bullets, on_terminal
from loadtest.simulator.arms import UNLIMITED
from loadtest.statistics import Comparison, words
from loadtest.statistics.words import bounds

Part = Note | Table

_TONES: Final[dict[Outcome, Tone]] = {
    "passed": "good",
    "warned": "warning",
    "does not apply": "soft",
}
LIMITS: Final = (
    "Intervals are of 95 % each. Each covers both the intervals from resampled sessions and the "
    "differences between rounds. With many measures and variants, some will look different that "
    "are not.",
    "Each variant had the fleet to itself. What two policies would do to each other in one fleet "
    "is another question (see docs/evaluate/compare.md).",
    "Simulated and emulated times are those of a model: trust the order more than the numbers.",
)
"""What no report of this kind can know."""


def show(report: Report, console: Console) -> None:
    """Print the report; what is missing stands on top."""
    if not report.is_complete:
        console.print(Text(f"NOT COMPLETE: {report.note}", style="bold yellow"))
        console.print()
    console.print(on_terminal(arms_table(report)))
    console.print()
    limit = limit_table(report)
    if limit is not None:
        console.print(on_terminal(limit))
        console.print()
    console.print(on_terminal(differences_table(report)))
    console.print()
    console.print(on_terminal(checks_table(report), folds=(2, 3)))
    left_out = [text for text in caveats(report) if "are not compared" in text]
    texts = [lead(report), *left_out, *LIMITS]
    console.print()
    console.print(bullets(texts))


def make_page(report: Report) -> Page:
    """Lay the report out."""
    setting = report.setting
    run_text = (
        f"{setting.workload}; {', '.join(setting.labels)}, {setting.num_rounds} rounds; baseline "
        f"{setting.baseline}"
    )
    return Page(
        title=f"Comparison: {', '.join(setting.labels)}",
        lead=lead(report),
        sections=(
            Section(title="Differences", parts=tuple(_differences(report))),
            Section(title="The variants", parts=tuple(_arms(report))),
            Section(title="Can it be trusted?", parts=(checks_table(report),)),
            Section(title="What was run", parts=(_plain(run_text),)),
            Section(title="What this cannot say", parts=tuple(map(_plain, LIMITS))),
        ),
        footer=(
            f"warmroute {report.machine.warmroute}, Python {report.machine.python} on "
            f"{report.machine.system}, {report.machine.num_cpus} CPUs. Made by "
            "`warmroute compare` from run files."
        ),
    )


def _differences(report: Report) -> Iterable[Part]:
    for text in caveats(report):
        yield Note(text=text, kind="warning")
    if report.is_complete and all(check.outcome != "warned" for check in report.checks):
        yield Note(text="Every check passed.", kind="good")
    if not report.comparisons:
        yield _plain("No two variants have turns in common: there is nothing to compare.")
    yield differences_table(report)


def _arms(report: Report) -> Iterable[Part]:
    yield arms_table(report)
    yield origins_table(report)
    limit = limit_table(report)
    if limit is not None:
        yield limit
    yield rounds_table(report)


def _plain(text: str) -> Note:
    return Note(text=text)


def lead(report: Report) -> str:
    """Answer in a few sentences: each variant against the baseline, by mean first-token time."""
    baseline = report.setting.baseline
    found = [c for c in report.comparisons if c.measure == "mean TTFT"]
    if not found:
        return f"Nothing can be compared with {baseline}: no turn succeeded in two variants."
    return f"Mean time to first token against {baseline}: " + "; ".join(map(_clause, found)) + "."


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


def hit_ratio(arm: ArmFigures) -> float | None:
    """Return cached tokens by prompt tokens; None: engines did not report them."""
    return 1 - arm.origin.computed / arm.origin.total if arm.origin.total else None


def arms_table(report: Report) -> Table:
    """List the figures of each variant, over all its turns that succeeded."""
    return Table(
        head=(
            "variant", "turns", "failed", "session", "P99", "longest", "TTFT", "P90",
            "P99", "computed", "hit", "predicted", "busiest", "good",
        ),
        rows=tuple(_arm(arm, report.setting.baseline) for arm in report.arms),
        numeric=tuple(range(1, 14)),
        tones=tuple("bad" if arm.whole.num_errors else "" for arm in report.arms),
        toned=2,
        caption="Over all turns that succeeded in the variant. Session: from its first request to "
        "its last answer. Computed: prompt tokens a turn that no cache had, new ones included. "
        "Predicted: turns whose cached tokens the router predicted exactly. Busiest: tokens "
        "computed by the busiest replica over the mean. Good: turns within the SLO.",
    )  # fmt: skip


def origins_table(report: Report) -> Table:
    """List where the prompt tokens of each variant came from."""
    kinds = ("gpu", "cpu", "pool", "unknown", "computed")
    return Table(
        head=("variant", "GPU cache", "CPU cache", "pool", "cached, tier unknown", "computed"),
        rows=tuple(
            (
                arm.label,
                *(_a_turn(getattr(arm.origin, kind), arm.origin.num_turns) for kind in kinds),
            )
            for arm in report.arms
        ),
        numeric=tuple(range(1, 6)),
        caption="Prompt tokens a turn by where they came from: engines report how many were "
        "cached, the router in which tier.",
    )


def _a_turn(num_tokens: int, num_turns: int) -> str:
    return f"{num_tokens / num_turns:,.0f}" if num_turns else "-"


def _arm(arm: ArmFigures, baseline: str) -> tuple[str, ...]:
    whole = arm.whole
    has_times = whole.num_turns > whole.num_errors
    times = (whole.ttft_p90_s, whole.ttft_p99_s)
    ended = arm.sessions
    sessions = (None,) * 3 if ended is None else (ended.mean_s, ended.p99_s, ended.longest_s)
    return (
        arm.label + (" *" if arm.label == baseline else ""),
        f"{whole.num_turns:,}",
        f"{whole.num_errors:,}",
        *(words.value("s", seconds) for seconds in sessions),
        words.value("s", whole.ttft_mean_s if has_times else None),
        *(words.value("s", seconds if has_times else None) for seconds in times),
        _a_turn(arm.origin.computed, arm.origin.num_turns),
        words.value("share", hit_ratio(arm)),
        words.value("share", arm.prediction_exact_ratio),
        "-" if arm.imbalance is None else f"{arm.imbalance:.2f} ×",
        words.value("share", arm.good_share),
    )


def limit_table(report: Report) -> Table | None:
    """Divide each variant's figures by those on caches that never evict; None: nothing ran so."""
    limit = next((arm for arm in report.arms if arm.label == UNLIMITED), None)
    if limit is None:
        return None
    return Table(
        head=("variant over the limit", "computed", "TTFT", "P99", "session", "P99"),
        rows=tuple(
            (arm.label, *map(_times, _of_limit(arm), _of_limit(limit))) for arm in report.arms
        ),
        numeric=tuple(range(1, 6)),
        caption="Over `unlimited`: the same sessions through kv_aware on caches that never evict.",
    )


def _times(ours: float | None, limit: float | None) -> str:
    return f"{ours / limit:.2f} ×" if ours and limit else "-"


def _of_limit(arm: ArmFigures) -> tuple[float | None, ...]:
    whole, ended = arm.whole, arm.sessions
    return (
        whole.num_computed_tokens,
        whole.ttft_mean_s,
        whole.ttft_p99_s,
        None if ended is None else ended.mean_s,
        None if ended is None else ended.p99_s,
    )


def differences_table(report: Report) -> Table:
    """List every measure of every variant against the baseline, over the turns in common."""
    pairs = pairwise((None, *report.comparisons))
    return Table(
        head=(
            "measure", "variant", report.setting.baseline, "variant's", "effect", "95 %", "rounds",
            "verdict",
        ),
        rows=tuple(_difference(found, before) for before, found in pairs if found is not None),
        numeric=(2, 3, 4, 5, 6),
        tones=tuple(_tone(found) for found in report.comparisons),
        toned=7,
        caption="Over the turns that succeeded in both. Means are compared by their ratio, "
        "percentiles by their difference.",
    )  # fmt: skip


def _difference(found: Comparison, before: Comparison | None) -> tuple[str, ...]:
    is_first = before is None or before.measure != found.measure
    return (
        found.measure if is_first else "",
        found.arm,
        *words.figures(found),
        "no verdict" if found.verdict == "blurred" else found.verdict,
    )


def _tone(found: Comparison) -> Tone:
    if found.is_better is None:
        return "soft"
    return "good" if found.is_better else "bad"


def checks_table(report: Report) -> Table:
    """List every check with its figure."""
    return Table(
        head=("check", "", "figure", "what it means"),
        rows=tuple(
            (check.name, check.outcome, check.figure, check.meaning) for check in report.checks
        ),
        tones=tuple(_TONES[check.outcome] for check in report.checks),
        toned=1,
    )


def rounds_table(report: Report) -> Table:
    """List every run."""
    return Table(
        head=("round", "variant", "turns", "failed", "mean TTFT", "P90", "hit", "note"),
        rows=tuple(
            (
                str(one.round),
                arm.label,
                f"{one.summary.num_turns:,}",
                f"{one.summary.num_errors:,}",
                words.value("s", one.summary.ttft_mean_s),
                words.value("s", one.summary.ttft_p90_s),
                f"{one.summary.hit_ratio:.1%}",
                one.note,
            )
            for arm in report.arms
            for one in arm.rounds
        ),
        numeric=(2, 3, 4, 5, 6),
        caption="Every run.",
    )
