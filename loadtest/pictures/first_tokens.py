"""How first-token times are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.pictures.look import (
    Look,
    Rounds,
    draw,
    looks,
    number,
    readable_ticks,
    time_unit,
    ttfts,
)

Floats = NDArray[np.float64]

_POINTS: Final = 400  # of a curve; more would only make the file larger


def first_tokens(arms: Rounds) -> bytes | None:
    """Draw each variant's distribution; rounds as faint lines. None: no turn has a time."""
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


def _curve(times: Floats) -> tuple[Floats, Floats]:
    """Thin a distribution to so many points; the ends stay."""
    ordered = np.sort(np.maximum(times, 1e-6))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) <= _POINTS:
        return ordered, shares
    kept = np.unique(np.linspace(0, len(ordered) - 1, _POINTS).round().astype(int))
    return ordered[kept], shares[kept]
