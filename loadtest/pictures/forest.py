"""Differences with their intervals, one row each (a forest plot)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from loadtest.pictures.look import GRID, INK, SOFT, Look, draw, looks, readable_ticks
from loadtest.statistics import Comparison

_FRAME_IN: Final = 0.75  # above and below the rows
_LEAST: Final = 0.02  # a difference of percentiles may bound its ratio below 0


def forest(comparisons: Sequence[Comparison], labels: Sequence[str] = ()) -> bytes | None:
    """Draw every comparison as a ratio to the baseline. None: there are none.

    Full marks are differences, hollow ones within the spread, grey ones without a verdict; small
    strokes are the single rounds. Differences of percentiles are drawn in units of the
    baseline. `labels`: all variants, for the same colours as in other pictures.
    """
    shown = [found for found in comparisons if found.theirs > 0]
    if not shown:
        return None
    groups = [list(members) for _, members in groupby(shown, key=lambda found: found.measure)]
    look_of = looks([*labels, shown[0].baseline, *(found.arm for found in shown)])
    height = _FRAME_IN + 0.22 * len(shown) + 0.14 * (len(groups) - 1)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")  # text beside the axis is placed by hand
        low = 0.5 / height
        axis = figure.add_axes((0.28, low, 0.38, 1 - low - 0.1 / height))
        _paint(axis, groups, look_of)

    return draw(paint, width=10.5, height=height)


def _paint(axis: Any, groups: Sequence[Sequence[Comparison]], look_of: Mapping[str, Look]) -> None:
    transform = axis.get_yaxis_transform()
    row = 0.0
    for number, group in enumerate(groups):
        top = row
        for found in group:
            _row(axis, row, found, look_of[found.arm].colour)
            verdict = "no verdict" if found.verdict == "blurred" else found.verdict
            low, high = scaled(found, found.low), scaled(found, found.high)
            axis.text(-0.015, row, found.arm, color=look_of[found.arm].ink, ha="right",
                      va="center", transform=transform)  # fmt: skip
            axis.text(
                1.03, row, f"× {scaled(found, found.effect):.2f}  ({low:.2f} to {high:.2f})",
                va="center", transform=transform,
            )  # fmt: skip
            axis.text(1.50, row, verdict, va="center", transform=transform,
                      color=INK if found.verdict in ("less", "more") else SOFT,
                      weight="bold" if found.verdict in ("less", "more") else "normal")  # fmt: skip
            row += 1
        axis.text(-0.72, top, group[0].measure, va="center", weight="bold", transform=transform)
        if group[0].better == "more" and len(group) > 1:
            axis.text(-0.72, top + 0.9, "more is better", va="center", color=SOFT, fontsize=8.5,
                      transform=transform)  # fmt: skip
        if number < len(groups) - 1:
            axis.plot([-0.72, 1.75], [row - 0.18] * 2, color=GRID, lw=0.8, clip_on=False,
                      transform=transform)  # fmt: skip
        row += 0.64
    axis.axvline(1.0, color=INK, lw=1.0, zorder=1)
    axis.set(xscale="log", ylim=(row - 1.0, -0.7), yticks=[])
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 0.9), max(high, 1.12))
    readable_ticks(axis)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    baseline = groups[0][0].baseline
    axis.set_xlabel(f"ratio to {baseline}, 95 % interval; small strokes: each round")


def _row(axis: Any, row: float, found: Comparison, colour: str) -> None:
    shade = "#A0A7AE" if found.verdict == "blurred" else colour
    low, effect, high = (scaled(found, value) for value in (found.low, found.effect, found.high))
    axis.plot([low, high], [row, row], color=shade, lw=2.0, zorder=2)
    if len(found.rounds) > 1:
        rounds = [scaled(found, value) for value in found.rounds]
        axis.plot(rounds, [row] * len(rounds), "|", color=INK, ms=7, mew=0.8, zorder=4)
    is_difference = found.verdict in ("less", "more")
    axis.plot(effect, row, "o", ms=7, mfc=shade if is_difference else "white", mec=shade, mew=1.8,
              zorder=3)  # fmt: skip


def scaled(found: Comparison, value: float) -> float:
    """Write an effect or its bound as a ratio to the baseline's figure."""
    return max(_LEAST, value if found.kind == "ratio" else 1 + value / found.theirs)
