"""The cliff in pictures: figures against the number of agents, a line for each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.pictures.look import Look, draw, label_ends, looks
from loadtest.studies.grid_run import DEFAULT, WITHOUT_QUEUE

_GOODPUT: Final = "turns per second with a first token within {:g} s"
_PANELS: Final = (
    ("goodput", _GOODPUT, False),
    ("ttft_mean_s", "mean time to first token, s (logarithmic)", True),
    ("completion_mean_s", "mean time to complete a session, s (logarithmic)", True),
)
_PLAIN_NAMES: Final = {
    DEFAULT: "warmroute",
    WITHOUT_QUEUE: "warmroute without the queue",
    "session_hash": "session hash",
}
_PLACE: Final = {"left": 0.08, "right": 0.7}  # names stand at the right, placed by hand


class Point(Struct, frozen=True, kw_only=True):
    """One variant at one number of sessions, in the mean of the seeds."""

    num_sessions: int
    arm: str
    goodput: float
    throughput: float
    num_uncached_tokens: float  # per turn
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    longest_wait_s: float  # of all seeds
    completion_mean_s: float
    num_errors: int = 0  # turns that failed, of all seeds


def draw_cliff(points: Sequence[Point], *, slo_ttft_s: float, kind: str = "svg") -> bytes:
    """Draw goodput, waiting and completion, one above the other; each line has its name."""
    look_of = _looks(points)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")
        grid = {**_PLACE, "top": 0.96, "bottom": 0.06, "hspace": 0.3}
        panels = figure.subplots(len(_PANELS), 1, sharex=True, gridspec_kw=grid)
        for axis, (name, title, is_logarithmic) in zip(panels, _PANELS, strict=True):
            if is_logarithmic:
                axis.set_yscale("log")
                _plain(axis.yaxis)
            _panel(axis, points, name, title.format(slo_ttft_s), look_of)
        panels[-1].set_xlabel("agents at the same time")

    return draw(paint, width=7.4, height=8.2, kind=kind)


def draw_goodput(points: Sequence[Point], *, slo_ttft_s: float, kind: str = "svg") -> bytes:
    """Draw goodput against the number of agents."""
    look_of = _looks(points)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")
        axis = figure.subplots(gridspec_kw={**_PLACE, "top": 0.88, "bottom": 0.16})
        _panel(axis, points, "goodput", _GOODPUT.format(slo_ttft_s), look_of)
        axis.set_xlabel("agents at the same time")

    return draw(paint, width=7.4, height=3.4, kind=kind)


def _looks(points: Sequence[Point]) -> dict[str, Look]:
    """Choose a look for each variant; warmroute without the queue is warmroute, dashed."""
    found = looks(point.arm for point in points)
    if WITHOUT_QUEUE in found and DEFAULT in found:
        found[WITHOUT_QUEUE] = replace(found[DEFAULT], stroke=(0, (4, 1.5)))
    return found


def _panel(
    axis: Any, points: Sequence[Point], name: str, title: str, look_of: Mapping[str, Look]
) -> None:
    ends = [_line(axis, points, arm, name, look) for arm, look in look_of.items()]
    axis.set_title(title)
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0.0)
    axis.get_figure().draw_without_rendering()  # limits are final
    label_ends(axis, ends)


def _line(
    axis: Any, points: Sequence[Point], arm: str, name: str, look: Look
) -> tuple[str, float, float, str]:
    """Draw a variant's line; return its name, where it ends, and the colour of the name."""
    line = [point for point in points if point.arm == arm]
    xs = [float(point.num_sessions) for point in line]
    ys = [float(getattr(point, name)) for point in line]
    axis.plot(xs, ys, color=look.colour, ls=look.stroke, marker="o", markersize=3.5)
    return _PLAIN_NAMES.get(arm, arm), xs[-1], ys[-1], look.ink


def _plain(of: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    of.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    of.set_minor_formatter(NullFormatter())
