"""First-token times: how they are distributed, and how they went over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.pictures.look import (
    Look,
    Rounds,
    counted,
    draw,
    label_ends,
    looks,
    number,
    readable_ticks,
    time_unit,
    ttfts,
)
from loadtest.results import TurnResult

Floats = NDArray[np.float64]

_POINTS: Final = 400  # of a curve; more would only make the file larger
_BINS: Final = 40
_MIN_IN_BIN: Final = 8


def first_tokens(arms: Rounds) -> bytes | None:
    """Draw each arm's distribution; rounds as faint lines. None: no turn has a time."""
    times = {label: [ttfts(turns) for turns in rounds] for label, rounds in arms.items()}
    if not any(any(rounds) for rounds in times.values()):
        return None

    def paint(figure: Any) -> None:
        paint_first_tokens(figure.subplots(), times, looks(arms))

    return draw(paint, height=4.2)


def paint_first_tokens(
    axis: Any, times_s: Mapping[str, Sequence[Sequence[float]]], look_of: Mapping[str, Look]
) -> None:
    """Draw the shares of turns (y) that had their first token by a time (x, logarithmic)."""
    pooled = {
        label: np.concatenate([np.asarray(times) for times in rounds])
        for label, rounds in times_s.items()
        if any(len(times) for times in rounds)
    }
    factor, unit = time_unit(float(np.quantile(times, 0.9)) for times in pooled.values())
    by_median = sorted(pooled, key=lambda label: float(np.median(pooled[label])))
    for label in by_median:
        look = look_of[label]
        if len(times_s[label]) > 1:
            for times in times_s[label]:
                if len(times):
                    axis.plot(*_curve(np.asarray(times) * factor), color=look.colour, lw=0.7,
                              alpha=0.45)  # fmt: skip
        median, ninety = (factor * np.quantile(pooled[label], share) for share in (0.5, 0.9))
        axis.plot(
            *_curve(pooled[label] * factor),
            color=look.colour,
            linestyle=look.stroke,
            label=f"{label}\n{number(median)} | {number(ninety)} {unit}",
        )
    axis.set(
        xscale="log",
        ylim=(0, 1.005),
        xlabel=f"time to first token, {unit} (logarithmic)",
        ylabel="share of turns",
    )
    readable_ticks(axis)
    axis.legend(
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        title="sooner first\nP50 | P90",
        alignment="left",
        labelspacing=0.7,
        handlelength=1.4,
        fontsize=9,
        title_fontsize=9,
    )


def over_time(arms: Rounds) -> bytes | None:
    """Draw the rolling median and P90, all rounds together. None: no turn has a time."""
    moments = {
        label: rolling([turn for turns in rounds for turn in counted(turns)])
        for label, rounds in arms.items()
    }
    moments = {label: found for label, found in moments.items() if len(found[0])}
    if not moments:
        return None
    highest = [float(found[2].max()) for found in moments.values()]
    factor, unit = time_unit(highest)

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        look_of = looks(arms)
        for axis, column, name in zip(axes, (1, 2), ("median", "P90"), strict=True):
            for label, found in moments.items():
                look = look_of[label]
                axis.plot(found[0], found[column] * factor, color=look.colour,
                          linestyle=look.stroke, lw=1.6)  # fmt: skip
            axis.set(yscale="log", title=name, xlabel="seconds from the first turn")
            readable_ticks(axis, which="y")
        axes[0].set_ylabel(f"time to first token, {unit} (log.)")
        figure.draw_without_rendering()
        for axis, column in zip(axes, (1, 2), strict=True):
            label_ends(
                axis,
                [
                    (label, found[0][-1], found[column][-1] * factor, look_of[label].ink)
                    for label, found in moments.items()
                ],
            )

    return draw(paint, width=10.5, height=3.8)


def rolling(turns: Sequence[TurnResult]) -> tuple[Floats, Floats, Floats]:
    """Compute median and P90 over windows of time, each window a tenth of the run.

    Returns:
        Middle of each window in seconds, median, P90; windows with too few turns are left out.
    """
    known = sorted((_sent_s(turn), turn.ttft_s) for turn in turns if turn.ttft_s is not None)
    at = np.array([moment for moment, _ in known])
    times = np.array([ttft for _, ttft in known])
    if not len(at):
        return at, times, times
    width = max((at[-1] - at[0]) / 10, 1e-9)
    found = []
    for middle in np.linspace(at[0], at[-1], _BINS):
        low, high = np.searchsorted(at, (middle - width / 2, middle + width / 2))
        if high - low >= _MIN_IN_BIN:
            window = times[low:high]
            found.append((middle, np.median(window), np.quantile(window, 0.9)))
    columns = np.array(found).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _sent_s(turn: TurnResult) -> float:
    return turn.start_s if turn.due_s is None else turn.due_s


def _curve(times: Floats) -> tuple[Floats, Floats]:
    """Thin a distribution to so many points; the ends stay."""
    ordered = np.sort(np.maximum(times, 1e-6))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) <= _POINTS:
        return ordered, shares
    kept = np.unique(np.linspace(0, len(ordered) - 1, _POINTS).round().astype(int))
    return ordered[kept], shares[kept]
