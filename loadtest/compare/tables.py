"""The tables of a comparison, for the terminal and for the page."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from loadtest.compare import answer
from loadtest.compare.arms import UNLIMITED
from loadtest.compare.hygiene import Outcome
from loadtest.compare.report import ArmFigures, Report
from loadtest.pages import Table, Tone
from loadtest.pictures.look import number
from loadtest.statistics import Comparison, words

_TONES: Final[dict[Outcome, Tone]] = {
    "passed": "good",
    "warned": "warning",
    "does not apply": "soft",
}


def arms_table(report: Report) -> Table:
    """List the figures of each variant, over all its turns that succeeded."""
    return Table(
        head=(
            "variant", "turns", "failed", "session", "P99", "longest", "TTFT", "over rounds", "P90",
            "P99", "computed", "hit", "predicted", "busiest", "good",
        ),
        rows=tuple(_arm(arm, report.setting.baseline) for arm in report.arms),
        numeric=tuple(range(1, 15)),
        tones=tuple("bad" if arm.whole.num_errors else "" for arm in report.arms),
        toned=2,
        caption="Over all turns that succeeded in the variant. Session: from its first request to "
        "its last answer. Computed: prompt tokens a turn that no cache had, new ones included. "
        "Predicted: turns whose cached tokens the router predicted exactly. Busiest: tokens "
        "computed by the busiest replica over the mean. Good: turns within the SLO.",
    )  # fmt: skip


def _arm(arm: ArmFigures, baseline: str) -> tuple[str, ...]:
    whole = arm.whole
    has_times = whole.num_turns > whole.num_errors
    times = (whole.ttft_p90_s, whole.ttft_p99_s)
    computed = arm.origin.computed / arm.origin.num_turns if arm.origin.num_turns else None
    ended = arm.sessions
    sessions = (None,) * 3 if ended is None else (ended.mean_s, ended.p99_s, ended.longest_s)
    return (
        arm.label + (" *" if arm.label == baseline else ""),
        f"{whole.num_turns:,}",
        f"{whole.num_errors:,}",
        *(words.value("s", seconds) for seconds in sessions),
        words.value("s", whole.ttft_mean_s if has_times else None),
        _spread(arm),
        *(words.value("s", seconds if has_times else None) for seconds in times),
        "-" if computed is None else f"{computed:,.0f}",
        words.value("share", answer.hit_ratio(arm)),
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


def _spread(arm: ArmFigures) -> str:
    """Write the range of the mean first-token times over complete rounds."""
    means = [r.summary.ttft_mean_s for r in arm.rounds if r.is_complete and r.summary.ttft_mean_s]
    if len(means) < 2:
        return "-"
    unit = 1.0 if max(means) >= 10 else 1e3
    return f"{number(min(means) * unit)}–{number(max(means) * unit)}"


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
