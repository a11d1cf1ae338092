"""The pressure map in one picture: a column for each kind of traffic, a row for each figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from loadtest.pictures.look import Look, draw, label_ends, looks

_ROWS: Final = (
    ("good_ratio", "within limits, %", 100.0),
    ("ttft_mean_s", "mean TTFT, s", 1.0),
    ("num_computed_tokens", "computed tokens / request", 1.0),
)


class Point(Struct, frozen=True, kw_only=True):
    """One policy in one setting. `family`: `skew 1`, or `siblings`; `x`: ratio, or burst size."""

    family: str
    x: float
    policy: str
    good_ratio: float
    ttft_mean_s: float
    num_computed_tokens: float  # per request


def draw_map(points: Sequence[Point], *, kind: str = "svg") -> bytes:
    """Draw the map; lines are named at the right of each row."""
    families = list(dict.fromkeys(point.family for point in points))
    look_of = looks(dict.fromkeys(point.policy for point in points))

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")  # names beside the axes are placed by hand
        places = {"left": 0.06, "right": 0.85, "top": 0.95, "bottom": 0.07}
        axes = figure.subplots(
            len(_ROWS),
            len(families),
            squeeze=False,
            gridspec_kw={**places, "wspace": 0.3, "hspace": 0.26},
        )
        for row, (name, label, factor) in enumerate(_ROWS):
            for column, family in enumerate(families):
                axis = axes[row][column]
                members = [point for point in points if point.family == family]
                ends = _lines(axis, members, name, factor, look_of)
                if name == "ttft_mean_s":
                    axis.set_yscale("log")
                    _plain(axis.yaxis)
                else:
                    axis.set_ylim(bottom=0.0)
                if row == 0:
                    axis.set_title(_title(family))
                if column == 0:
                    axis.set_ylabel(label)
                if row == len(_ROWS) - 1:
                    axis.set_xlabel("siblings in a burst" if family == "siblings"
                                    else "working set / caches")  # fmt: skip
                if column == len(families) - 1:
                    label_ends(axis, ends)

    return draw(paint, width=13.0, height=8.0, kind=kind)


def _lines(
    axis: Any, members: Sequence[Point], name: str, factor: float, look_of: Mapping[str, Look]
) -> list[tuple[str, float, float, str]]:
    """Draw a line for each policy; return where each ends, and what it is called."""
    ends = []
    axis.set_xscale("log")
    for policy in dict.fromkeys(point.policy for point in members):
        line = [point for point in members if point.policy == policy]
        xs = [point.x for point in line]
        ys = [factor * getattr(point, name) for point in line]
        look = look_of[policy]
        axis.plot(xs, ys, color=look.colour, ls=look.stroke, marker="o", markersize=3.5)
        ends.append((policy, xs[-1], ys[-1], look.ink))
    axis.set_xticks([point.x for point in members if point.policy == members[0].policy])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_locator(_no_ticks())
    return ends


def _plain(of: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    of.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    of.set_minor_formatter(NullFormatter())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _title(family: str) -> str:
    return "bursts of siblings" if family == "siblings" else f"Zipf {family}"
