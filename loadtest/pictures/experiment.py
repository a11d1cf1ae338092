"""Pictures of a live experiment: how the verdict grew, each variant's requests and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.pictures.look import GRID, INK, SOFT, draw, looks, readable_ticks
from loadtest.pictures.origins import Origin, paint_origins

Floats = NDArray[np.floating[Any]]

_POINTS: Final = 400  # of a curve
_WIDEST: Final = 1.0  # of what is drawn of an interval: doubled, or nothing left
_ROOM: Final = 2.5  # of the picture, in last intervals: what was wide at first is cut off


class Growth(Struct, frozen=True, kw_only=True):
    """A variant's difference to the baseline, look by look; infinite bounds: nothing is known.

    All of shape (num_looks,); differences are shares: 0.1 is 10 % (or 10 points).
    """

    at_s: Floats  # unix seconds
    value: Floats
    low: Floats
    high: Floats


def growth(arms: Mapping[str, Growth], *, baseline: str, margin: float, what: str) -> bytes | None:
    """Draw intervals that hold at every look, over time. None: nothing was ever known."""
    known = {
        arm: found for arm, found in arms.items() if np.any(np.isfinite(found.high - found.low))
    }
    if not known:
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        look_of = looks([baseline, *arms])
        begin_s = min(float(found.at_s[0]) for found in arms.values())
        span_s = max(float(found.at_s[-1]) for found in arms.values()) - begin_s
        size, unit = _time_unit(span_s)
        for arm, found in known.items():
            at = (found.at_s - begin_s) / size
            look = look_of[arm]
            low, high = (100 * np.clip(v, -_WIDEST, 10.0) for v in (found.low, found.high))
            axis.fill_between(at, low, high, color=look.colour, alpha=0.2, lw=0, step="post")
            axis.step(at, 100 * found.value, where="post", color=look.colour, label=arm)
        reach = max(
            float(np.nanmax(np.abs([found.low[-1], found.high[-1]])))
            if np.isfinite(found.low[-1])
            else _WIDEST
            for found in known.values()
        )
        bound = 100 * min(_WIDEST, max(_ROOM * reach, 2 * margin))
        axis.axhspan(-100 * margin, 100 * margin, color=GRID, alpha=0.5, lw=0, zorder=0)
        axis.axhline(0.0, color=INK, lw=1.0)
        axis.text(
            0.995, 100 * margin, "too small to matter", fontsize=8.5, color=SOFT, ha="right",
            va="bottom", transform=axis.get_yaxis_transform(),
        )  # fmt: skip
        started = datetime.fromtimestamp(begin_s, UTC)
        axis.set(
            ylim=(-bound, bound),
            xlim=(0, span_s / size if span_s else 1),
            xlabel=f"{unit} since {started:%Y-%m-%d %H:%M} UTC",
            ylabel=f"{what}, against {baseline}",
        )
        axis.legend(loc="upper right")

    return draw(paint, height=3.8)


def distributions(times_ms: Mapping[str, tuple[Floats, Floats]]) -> bytes | None:
    """Draw each variant's first-token times (values and weights). None: there are none."""
    known = {arm: found for arm, found in times_ms.items() if len(found[0])}
    if not known:
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        look_of = looks(times_ms)
        for arm, (values, weights) in known.items():
            look = look_of[arm]
            axis.plot(
                *curve_of(values, weights), color=look.colour, linestyle=look.stroke, label=arm
            )
        axis.set(
            xscale="log",
            ylim=(0, 1.005),
            xlabel="time to first token, ms (logarithmic)",
            ylabel="share of requests",
        )
        readable_ticks(axis)
        axis.legend(loc="lower right")

    return draw(paint, height=3.8)


def sources(arms: Mapping[str, Mapping[str, float]]) -> bytes | None:
    """Draw where prompt tokens came from, as predicted: tokens per request by source."""
    found = {
        arm: Origin(
            num_turns=1,
            gpu=round(parts["gpu"]),
            cpu=round(parts["cpu"]),
            pool=round(parts["pool"]),
            unknown=0,
            computed=round(parts["computed"]),
        )
        for arm, parts in arms.items()
    }
    found = {arm: parts for arm, parts in found.items() if parts.total}
    if not found:
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        paint_origins(axis, found)
        axis.set_xlabel("prompt tokens per request, as predicted")

    return draw(paint, height=1.3 + 0.46 * len(found))


def ratio(seen: Mapping[str, int], expected: Mapping[str, float], noun: str) -> bytes | None:
    """Draw the units of each variant beside those that were meant. None: there are none."""
    if not sum(seen.values()):
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        look_of = looks(seen)
        names = list(seen)[::-1]
        for row, arm in enumerate(names):
            axis.barh(row, seen[arm], 0.6, color=look_of[arm].colour)
            axis.plot([expected[arm]] * 2, [row - 0.42, row + 0.42], color=INK, lw=2.0)
            axis.text(
                max(seen[arm], expected[arm]), row, f"  {seen[arm]:,} of {expected[arm]:,.0f}",
                va="center", fontsize=9,
            )  # fmt: skip
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(0, 1.25 * max(*seen.values(), *expected.values()))
        axis.set_xlabel(f"{noun}; the stroke: as many as were meant")
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0, labelcolor=INK)

    return draw(paint, height=0.9 + 0.42 * len(seen))


def curve_of(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Thin a weighted distribution to so many points; the ends stay."""
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    ordered = np.maximum(values[order], 1e-3)
    if len(ordered) > _POINTS:
        kept = np.unique(np.linspace(0, len(ordered) - 1, _POINTS).round().astype(int))
        ordered, shares = ordered[kept], shares[kept]
    return ordered, shares


def _time_unit(span_s: float) -> tuple[float, str]:
    sizes: Sequence[tuple[float, str]] = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"))
    return next(((size, name) for size, name in sizes if span_s >= 3 * size), (1.0, "seconds"))
