"""The demo in one picture, PNG and SVG: what each policy had the replicas compute again.

matplotlib is optional (extra `plots`): without it there is no picture, and that is said.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from loadtest.demo.report import Report, RunReport
from loadtest.pictures import draw as make_picture
from loadtest.pictures.look import INK, SOFT
from loadtest.words import ratio, thousands

_TITLE_CHARS: Final = 64
_NEW: Final = "#c3cad2"
_AGAIN: Final = "#D55E00"  # of Okabe and Ito, as in `loadtest.pictures.look`


def draw(report: Report, out: Path) -> list[Path]:
    """Draw `demo.png` and `demo.svg` into `out`; return their paths.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    height = 2.2 + 0.5 * len(report.runs)
    paths = [out / "demo.png", out / "demo.svg"]
    for path in paths:
        kind = path.suffix[1:]
        picture = make_picture(lambda f: _paint(f, report), width=9.0, height=height, kind=kind)
        path.write_bytes(picture)
    return paths


def split(report: Report, run: RunReport) -> tuple[int, int]:
    """Split what a run computed into new text and what had been computed before."""
    # The least is an estimate of all seeds together.
    least = report.least_tokens // max(1, len(report.seeds))
    computed = run.summary.num_recomputed_tokens
    return min(least, computed), max(0, computed - least)


def _paint(figure: Any, report: Report) -> None:
    axis = figure.subplots()
    runs = report.runs[::-1]  # the first policy on top
    parts = [split(report, run) for run in runs]
    rows = range(len(runs))
    new, again = ([part[i] / 1e3 for part in parts] for i in (0, 1))
    axis.barh(rows, new, color=_NEW, height=0.62, label="new text: any router computes it once")
    axis.barh(
        rows,
        again,
        left=new,
        color=_AGAIN,
        height=0.62,
        label="computed again: evicted, or cached on another replica",
    )
    for row, run in zip(rows, runs, strict=True):
        summary = run.summary
        axis.annotate(
            f"{thousands(summary.num_recomputed_tokens)} ({ratio(summary.hit_ratio)} hits)",
            xy=(summary.num_recomputed_tokens / 1e3, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    many = len(report.seeds) > 1
    axis.set_yticks(rows, [f"{run.policy} #{run.seed}" if many else run.policy for run in runs])
    axis.set_xlim(0, 1.22 * max((sum(part) for part in parts), default=1) / 1e3 or 1)
    axis.set_xlabel("prompt tokens computed, thousands")
    axis.grid(visible=False, axis="y")
    figure.suptitle(
        "\n".join(wrap(report.headline, _TITLE_CHARS)), x=0.01, ha="left", weight="bold"
    )
    figure.legend(loc="outside lower left", ncols=2, labelcolor=SOFT)
