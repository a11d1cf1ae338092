"""One look for all pictures: colours, type, grid, labels, and the way to SVG.

Colours are Okabe and Ito's, distinct in every kind of colour vision. Yellow is too faint for a line
and left out. If there are more variants than colours, strokes are broken. A policy has the same
colour in every picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from loadtest.extras import need
from loadtest.results import TurnResult

Rounds = Mapping[str, Sequence[Sequence[TurnResult]]]
"""Variant to the turns of each of its rounds."""

INK: Final = "#1b1f24"
SOFT: Final = "#59636e"
GRID: Final = "#d5dae0"

_GREEN, _ORANGE, _BLUE, _RED = "#009E73", "#E69F00", "#0072B2", "#D55E00"
_SKY, _PINK, _GREY, _BLACK = "#56B4E9", "#CC79A7", "#8A8A8A", "#000000"
_COLOURS: Final = (_GREEN, _BLUE, _ORANGE, _RED, _SKY, _PINK, _GREY, _BLACK)
_COARSE: Final = (1.0, 2.0, 5.0)
_STROKES: Final = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_OF_POLICIES: Final = {
    "kv_aware": _GREEN,
    "least_loaded": _SKY,
    "session_sticky": _ORANGE,
    "round_robin": _GREY,
    "session_hash": _RED,
    "prefix_hash": _PINK,
    "min_ttft": _BLUE,
    "mooncake": _BLACK,
}

_STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.fonttype": "path",  # the reader's machine may lack the font
    "svg.hashsalt": "warmroute",  # same figures, same bytes
}


class Look(Struct, frozen=True, kw_only=True):
    """How a variant's lines look: matplotlib's colour and line style."""

    colour: str
    stroke: Any = "-"

    @property
    def ink(self) -> str:
        """Return the colour for text: darker, because thin strokes on white are hard to read."""
        parts = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return "#" + "".join(f"{round(part * 0.72):02x}" for part in parts)


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Choose a look for every variant; known policies keep their colour in every picture."""
    wanted = list(dict.fromkeys(labels))
    found = {name: Look(colour=_OF_POLICIES[name]) for name in wanted if name in _OF_POLICIES}
    taken = {look.colour for look in found.values()}
    free: list[tuple[str, Any]] = [(colour, "-") for colour in _COLOURS if colour not in taken]
    free += [(colour, stroke) for stroke in _STROKES[1:] for colour in _COLOURS]
    rest = [name for name in wanted if name not in found]
    for number, name in enumerate(rest):
        colour, stroke = free[number % len(free)]
        found[name] = Look(colour=colour, stroke=stroke)
    return {name: found[name] for name in wanted}


def draw(paint: Callable[[Any], None], *, width: float = 9.0, height: float = 4.0) -> bytes:
    """Make a picture: `paint` gets an empty figure of that many inches.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib = need("matplotlib")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
        paint(figure)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def readable_ticks(axis: Any) -> None:
    """Write a logarithmic axis in plain numbers: at 1, 2 and 5, closer within one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    of = axis.xaxis
    low, high = of.get_view_interval()
    near = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    of.set_major_locator(LogLocator(subs=near if high < 6 * low else _COARSE, numticks=15))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    of.set_minor_formatter(NullFormatter())
    of.set_tick_params(which="minor", length=0)


def counted(turns: Iterable[TurnResult]) -> list[TurnResult]:
    """Leave out what failed and what was sent to warm up."""
    return [turn for turn in turns if turn.error is None and not turn.is_warm_up]
