"""The comparison in one picture: computed tokens and time of a session behind each router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from loadtest.compare.arms import UNLIMITED
from loadtest.dev.studies.grid_run import DEFAULT, WITHOUT_QUEUE, GridRun
from loadtest.dev.studies.grid_table import Sum, sums
from loadtest.pictures.look import INK, draw, looks

_PLAIN_NAMES: Final = {
    DEFAULT: "warmroute",
    WITHOUT_QUEUE: "warmroute, routing only",
    UNLIMITED: "caches that never evict",
}
_OTHERS: Final = "#b4bbc3"


def slow_prefill(runs: Sequence[GridRun]) -> list[GridRun]:
    """Return the runs that the picture is drawn from: slow prefill, nothing behind the caches."""
    return [run for run in runs if run.cell.prefill == "slow" and run.cell.is_bare]


def draw_comparison(runs: Sequence[GridRun], routers: Sequence[str]) -> bytes:
    """Draw two bars for each router, the fewest computed tokens first.

    `routers` are the variants of other routers.
    """
    shown = {*_PLAIN_NAMES, *routers}
    found = [each for each in sums(slow_prefill(runs)) if each.arm in shown]
    found.sort(key=lambda each: each.num_computed_tokens, reverse=True)

    def paint(figure: Any) -> None:
        tokens, times = figure.subplots(1, 2, sharey=True)
        figure.suptitle(
            "Two vLLM replicas (CPU build, tiny model, slow prefill, small caches): less is better",
            x=0.01, ha="left", fontsize=9.5, color=INK,
        )  # fmt: skip
        millions = [each.num_computed_tokens / 1e6 for each in found]
        _bars(tokens, found, millions, "%.2f", "computed tokens, millions")
        took_s = [each.session_mean_s or 0.0 for each in found]
        _bars(times, found, took_s, "%.0f", "a session takes, s (mean)")

    return draw(paint, width=7.4, height=1.1 + 0.32 * len(found))


def _bars(axis: Any, found: Sequence[Sum], values: Sequence[float], form: str, title: str) -> None:
    """Draw a bar for each router with its value; warmroute's has a colour of its own."""
    ours = looks([DEFAULT])[DEFAULT].colour
    colours = [ours if each.arm == DEFAULT else _OTHERS for each in found]
    drawn = axis.barh(range(len(found)), values, 0.66, color=colours)
    axis.bar_label(drawn, fmt=form, padding=4, color=INK, fontsize=9)
    axis.set_title(title)
    axis.set_yticks(range(len(found)), [_PLAIN_NAMES.get(each.arm, each.arm) for each in found])
    axis.set_xlim(0.0, 1.18 * max(values, default=0.0) or 1.0)
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="x", bottom=False, labelbottom=False)
    axis.tick_params(axis="y", length=0, labelcolor=INK)
