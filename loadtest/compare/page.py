"""A report as one HTML file: the answer, what limits it, pictures, every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

from loadtest import pictures
from loadtest.compare import answer
from loadtest.compare.hygiene import Outcome
from loadtest.compare.report import Report, turns_by_arm
from loadtest.compare.terminal import spread
from loadtest.extras import MissingExtra
from loadtest.pages import Figure, Note, Page, Section, Table, Tone
from loadtest.results import Run
from loadtest.statistics import Comparison, words

Part = Note | Table | Figure

_TONES: Final[dict[Outcome, Tone]] = {
    "passed": "good",
    "warned": "warning",
    "does not apply": "soft",
}


def make_page(report: Report, runs: Sequence[Run]) -> Page:
    """Lay the report out; without matplotlib it says so in the place of pictures."""
    setting = report.setting
    return Page(
        title=f"Comparison: {', '.join(setting.labels)}",
        lead=answer.lead(report),
        sections=(
            Section(title="Differences", parts=tuple(_differences(report))),
            Section(title="The variants", parts=tuple(_arms(report, runs))),
            Section(title="Can it be trusted?", parts=tuple(_belief(report))),
            Section(title="What was run", parts=tuple(map(_plain, answer.describe(report)))),
            Section(title="What this cannot say", parts=tuple(map(_plain, answer.limits(report)))),
        ),
        footer=(
            f"warmroute {report.machine.warmroute}, Python {report.machine.python} on "
            f"{report.machine.system}, {report.machine.num_cpus} CPUs. Made again from the run "
            "files with: warmroute compare --from DIR"
        ),
    )


def _belief(report: Report) -> Iterable[Part]:
    yield Table(
        head=("check", "", "figure", "what it means"),
        tones=tuple(_TONES[check.outcome] for check in report.checks),
        toned=1,
        rows=tuple(
            (check.name, check.outcome, check.figure, check.meaning) for check in report.checks
        ),
    )


def _differences(report: Report) -> Iterable[Part]:
    for text in answer.caveats(report):
        yield Note(text=text, kind="warning")
    if report.is_complete and all(check.outcome != "warned" for check in report.checks):
        yield Note(text="Every check passed.", kind="good")
    for text in answer.paragraphs(report):
        yield Note(text=text)
    yield from _picture(
        lambda: pictures.forest(report.comparisons, report.setting.labels),
        alt="Each measure of each variant as a ratio to the baseline, with its interval",
        caption="Full marks are differences; hollow ones are within the spread, grey ones have "
        "no verdict.",
        absent="No two variants have turns in common: there is nothing to compare.",
    )
    yield Table(
        head=("measure", "arm", report.setting.baseline, "arm's", "effect", "95 %",
              "rounds", "turns", "sessions", "verdict"),
        rows=tuple(
            _row(found, before)
            for before, found in pairwise((None, *report.comparisons))
            if found is not None
        ),
        numeric=(2, 3, 4, 5, 6, 7, 8),
        tones=tuple(_tone(found) for found in report.comparisons),
        toned=9,
        caption="Over the turns that succeeded in both. Means are compared by their ratio, "
        "percentiles by their difference.",
    )  # fmt: skip


def _tone(found: Comparison) -> Tone:
    if found.is_better is None:
        return "soft"
    return "good" if found.is_better else "bad"


def _row(found: Comparison, before: Comparison | None) -> tuple[str, ...]:
    is_first = before is None or before.measure != found.measure
    return (
        found.measure if is_first else "",
        found.arm,
        *words.figures(found),
        f"{found.num_turns:,}",
        f"{found.num_clusters:,}",
        "no verdict" if found.verdict == "blurred" else found.verdict,
    )


def _arms(report: Report, runs: Sequence[Run]) -> Iterable[Part]:
    arms = turns_by_arm(report.setting, runs)
    yield from _picture(
        lambda: pictures.first_tokens(arms),
        alt="Distribution of first-token times of each variant",
        caption="First-token times; faint lines are single rounds.",
        absent="No turn has a first-token time.",
    )
    yield from _picture(
        lambda: pictures.over_time(arms),
        alt="Rolling median and P90 of first-token times over a run",
        caption="First-token times over a run, all rounds together; each point is a tenth of it.",
        absent="Too few turns to show first-token times over time.",
    )
    yield from _picture(
        lambda: pictures.origins(arms),
        alt="Prompt tokens per turn by where they came from",
        caption="Where prompt tokens came from: how many were cached is the engines' word, in "
        "which tier the router's.",
        absent="No engine reported how many tokens were cached.",
    )
    yield from _picture(
        lambda: pictures.load(arms),
        alt="Requests in flight at each replica over time",
        caption="Requests in flight per replica, in each variant's first whole round. A name's "
        "figure compares the replica that computed most with the mean.",
        absent="Answers do not name the replica they came from: load per replica is not known.",
    )
    yield Table(
        head=("arm", "turns", "failed", "mean TTFT", "over rounds", "P50", "P90", "P99", "mean ITL",
              "mean turn", "hit", "recomputed / turn", "predicted exactly", "busiest : mean",
              "within SLO", "good / s"),
        rows=tuple(
            (
                arm.label,
                f"{arm.whole.num_turns:,}",
                f"{arm.whole.num_errors:,}",
                words.value("s", arm.whole.ttft_mean_s),
                spread(arm),
                words.value("s", arm.whole.ttft_p50_s),
                words.value("s", arm.whole.ttft_p90_s),
                words.value("s", arm.whole.ttft_p99_s),
                words.value("s", arm.tbt_mean_s),
                words.value("s", arm.whole.total_mean_s),
                words.value("share", answer.hit_ratio(arm)),
                f"{arm.origin.recomputed / arm.origin.num_turns:,.0f}"
                if arm.origin.num_turns else "-",
                words.value("share", arm.prediction_exact_ratio),
                "-" if arm.imbalance is None else f"{arm.imbalance:.2f}",
                words.value("share", arm.good_share),
                "-" if arm.good_per_s is None else f"{arm.good_per_s:.2f}",
            )
            for arm in report.arms
        ),
        numeric=tuple(range(1, 16)),
        caption="Over all turns that succeeded in the variant, whatever became of them in others.",
    )  # fmt: skip
    yield _rounds(report)


def _rounds(report: Report) -> Table:
    return Table(
        head=("round", "arm", "turns", "failed", "mean TTFT", "P90", "hit", "note"),
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


def _picture(
    make: Callable[[], bytes | None], *, alt: str, caption: str, absent: str
) -> Iterable[Part]:
    try:
        svg = make()
    except MissingExtra as error:
        yield Note(text=f"No picture: {error}.", kind="warning")
        return
    yield Note(text=absent) if svg is None else Figure(svg=svg, alt=alt, caption=caption)


def _plain(text: str) -> Note:
    return Note(text=text)
