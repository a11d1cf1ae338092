"""The cliff in one picture: figures against the number of sessions, a line for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from loadtest.pictures.look import Look, draw, label_ends, looks

_PANELS: Final = (
    ("goodput", "good turns a second", False),
    ("ttft_mean_s", "mean time to first token, s", True),
    ("completion_mean_s", "mean time to complete a session, s", True),
)


class Point(Struct, frozen=True, kw_only=True):
    """One arm at one number of sessions, in the mean of the seeds."""

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


def draw_cliff(points: Sequence[Point], *, kind: str = "svg") -> bytes:
    """Draw goodput, waiting and completion side by side; lines are named at the right."""
    arms = list(dict.fromkeys(point.arm for point in points))
    look_of = looks(arms)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")  # names beside the last panel are placed by hand
        places = {"left": 0.05, "right": 0.88, "top": 0.9, "bottom": 0.15, "wspace": 0.22}
        panels = figure.subplots(1, len(_PANELS), squeeze=False, gridspec_kw=places)[0]
        for axis, (name, title, is_logarithmic) in zip(panels, _PANELS, strict=True):
            ends = [_line(axis, points, arm, name, look_of) for arm in arms]
            axis.set_title(title)
            axis.set_xlabel("sessions alive at once")
            if is_logarithmic:
                axis.set_yscale("log")
                _plain(axis.yaxis)
            else:
                axis.set_ylim(bottom=0.0)
        label_ends(panels[-1], ends)

    return draw(paint, width=13.0, height=4.0, kind=kind)


_PLAIN_NAMES: Final = {
    "kv_aware": "warmroute",
    "kv_aware:queue.mode=off": "warmroute without its queue",
    "session_hash": "session hash",
}


def draw_goodput(points: Sequence[Point], *, kind: str = "svg") -> bytes:
    """Draw goodput against the number of agents, with names a newcomer can read."""
    arms = list(dict.fromkeys(point.arm for point in points))
    look_of = looks(arms)

    def paint(figure: Any) -> None:
        figure.set_layout_engine("none")  # names beside the panel are placed by hand
        axis = figure.subplots(
            gridspec_kw={"left": 0.08, "right": 0.72, "top": 0.88, "bottom": 0.16}
        )
        ends = [_line(axis, points, arm, "goodput", look_of) for arm in arms]
        axis.set_title("Turns a second with a first token within 2 s")
        axis.set_xlabel("agents at work at once")
        axis.set_ylim(bottom=0.0)
        label_ends(axis, [(_PLAIN_NAMES.get(end[0], end[0]), *end[1:]) for end in ends])

    return draw(paint, width=8.0, height=3.6, kind=kind)


def _line(
    axis: Any, points: Sequence[Point], arm: str, name: str, look_of: Mapping[str, Look]
) -> tuple[str, float, float, str]:
    """Draw an arm's line; return where it ends, and what it is called."""
    line = [point for point in points if point.arm == arm]
    xs = [float(point.num_sessions) for point in line]
    ys = [float(getattr(point, name)) for point in line]
    look = look_of[arm]
    axis.plot(xs, ys, color=look.colour, ls=look.stroke, marker="o", markersize=3.5)
    return arm, xs[-1], ys[-1], look.ink


def _plain(of: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    of.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    of.set_minor_formatter(NullFormatter())
