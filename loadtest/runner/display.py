"""What is to be seen while it runs: a live block on a terminal, plain lines where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.runner.tally import RECENT_S, Tally, percentile
from loadtest.words import clock, duration, ratio

_LINE_EVERY_S: Final = 5.0
_BAR_WIDTH: Final = 40
_SHARES: Final = (0.5, 0.9, 0.99)


class Display(Protocol):
    """Shows a tally; a context, so that a terminal is left as it was."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def update(self, tally: Tally) -> None:
        """Show newer figures; called several times a second."""
        ...


def make_display(console: Console) -> Display:
    """Choose a live block for a terminal, lines for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class PlainDisplay:
    """One line every few seconds; for logs."""

    __slots__ = ("_console", "_due_s", "_said_s", "_tally")

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due_s = _LINE_EVERY_S
        self._said_s = -1.0
        self._tally: Tally | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tally is not None and self._said_s < self._tally.elapsed_s:
            self._say(self._tally)

    def update(self, tally: Tally) -> None:
        self._tally = tally
        if tally.elapsed_s >= self._due_s:
            self._due_s = tally.elapsed_s + _LINE_EVERY_S
            self._say(tally)

    def _say(self, tally: Tally) -> None:
        self._said_s = tally.elapsed_s
        self._console.print(progress_line(tally), markup=False, highlight=False, soft_wrap=True)


def progress_line(tally: Tally) -> str:
    """Put the figures into one line of about 110 columns."""
    parts = [
        f"{tally.elapsed_s:6.0f} s",
        f"{tally.num_done}/{tally.total_turns} turns",
        f"{tally.num_in_flight} in flight",
        "TTFT " + " ".join(_percentiles(tally)),
        f"cached {ratio(tally.hit_ratio)}",
        f"late p99 {duration(tally.late_s(0.99))}",
    ]
    if tally.errors:
        parts.append(f"ERRORS {error_counts(tally.errors)}")
    left_s = tally.left_s()
    if left_s:
        parts.append(f"about {clock(left_s)} left")
    return "  ".join(parts)


def _percentiles(tally: Tally) -> list[str]:
    return [f"p{share * 100:.0f} {duration(tally.ttft_s(share))}" for share in _SHARES]


class LiveDisplay:
    """A bar, first-token times now and over all, and what else matters."""

    __slots__ = ("_live", "_tally")

    def __init__(self, console: Console) -> None:
        self._tally: Tally | None = None
        # Refreshed by `update`: a thread of Live's own would hold the driver up when it likes.
        self._live = Live(get_renderable=self.render, console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, tally: Tally) -> None:
        self._tally = tally
        self._live.refresh()

    def render(self) -> Group:
        """Build what the terminal shows now."""
        tally = self._tally
        if tally is None:
            return Group()
        bar = Table.grid(padding=(0, 2, 0, 0))
        left_s = tally.left_s()
        bar.add_row(
            ProgressBar(total=max(1, tally.total_turns), completed=tally.num_done,
                        width=_BAR_WIDTH),
            f"{tally.num_done}/{tally.total_turns} turns",
            f"{tally.num_in_flight} in flight",
            clock(tally.elapsed_s),
            "" if left_s is None else f"about {clock(left_s)} left",
        )  # fmt: skip
        return Group(bar, _times(tally), _state(tally))


def _times(tally: Tally) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("TTFT", min_width=12)
    for share in _SHARES:
        table.add_column(f"p{share * 100:.0f}", justify="right", min_width=8)
    recent = tally.recent_ttfts()
    table.add_row(
        f"last {RECENT_S:.0f} s", *(duration(percentile(recent, share)) for share in _SHARES)
    )
    table.add_row("overall", *(duration(tally.ttft_s(share)) for share in _SHARES))
    return table


def _state(tally: Tally) -> Text:
    line = Text(f"cached {ratio(tally.hit_ratio)}   late p99 {duration(tally.late_s(0.99))}   ")
    if tally.errors:
        line.append(f"errors: {error_counts(tally.errors)}", style="bold red")
    else:
        line.append("no errors", style="dim")
    return line


def error_counts(errors: dict[str, int]) -> str:
    """Write errors by kind, the most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(errors.items(), key=_by_count))


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
