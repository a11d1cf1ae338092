"""What is to be seen while runs go on: a table on a terminal, lines where there is none.

One row for each label (a policy, a target, a variant) with its latest run. Below the table:
what was measured recently in the run that goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.runner.tally import RECENT_S, Tally, percentile
from loadtest.words import clock, duration, ratio, thousands

_LINE_EVERY_S: Final = 5.0
_REFRESH_S: Final = 0.25
_BAR_WIDTH: Final = 18
_SHARES: Final = (0.5, 0.9, 0.99)


class Display(Protocol):
    """Shows one run after the other; a context, so that a terminal is left as it was."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def starting(self, label: str) -> None:
        """Show that a run is being prepared: its processes start."""
        ...

    def update(self, tally: Tally) -> None:
        """Show newer figures of the run; may be called at every turn, in any thread."""
        ...

    def finished(self, tally: Tally, note: str = "") -> None:
        """Show the run's last figures, and what is to be said of it."""
        ...


def make_display(console: Console, labels: Sequence[str], num_rounds: int = 1) -> Display:
    """Choose a table for a terminal, lines for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, labels, num_rounds)
    return PlainDisplay(console, labels, num_rounds)


class PlainDisplay:
    """A line every few seconds and one at the end of a run; for logs."""

    __slots__ = ("_console", "_due_s", "_num_done", "_num_runs", "_width")

    def __init__(self, console: Console, labels: Sequence[str], num_rounds: int = 1) -> None:
        self._console = console
        self._num_runs = len(labels) * num_rounds
        self._num_done = 0
        self._width = max(map(len, labels)) if len(labels) > 1 else 0
        self._due_s = _LINE_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def starting(self, label: str) -> None:
        self._due_s = _LINE_EVERY_S
        self._print(f"{label}: starting replicas and router, caches cold")

    def update(self, tally: Tally) -> None:
        if tally.elapsed_s >= self._due_s:
            self._due_s = tally.elapsed_s + _LINE_EVERY_S
            self._print(self._name(tally) + progress_line(tally))

    def finished(self, tally: Tally, note: str = "") -> None:
        self._num_done += 1
        parts = [progress_line(tally), note or "done"]
        if self._num_runs > 1:
            parts.insert(0, f"{self._num_done}/{self._num_runs}")
        self._print(self._name(tally) + "  ".join(parts))

    def _name(self, tally: Tally) -> str:
        return f"{tally.label:<{self._width}}  " if self._width else ""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_line(tally: Tally) -> str:
    """Put a run's figures into one line of at most 100 columns (longer with errors)."""
    parts = [
        f"{tally.elapsed_s:4.0f} s",
        f"{tally.num_done}/{tally.total_turns}",
        "TTFT " + " ".join(_percentiles(tally)),
        f"hit {ratio(tally.hit_ratio)}",
    ]
    parts.append(f"late p99 {duration(tally.late_s(0.99))}")
    if tally.num_in_flight:
        parts.append(f"{tally.num_in_flight} in flight")
    if tally.errors:
        parts.append(f"FAILED {error_counts(tally.errors)}")
    return "  ".join(parts)


def _percentiles(tally: Tally) -> list[str]:
    return [f"p{share * 100:.0f} {duration(tally.ttft_s(share))}" for share in _SHARES]


class LiveDisplay:
    """A row for each label with the bar of its latest run, and below it the one that goes on."""

    __slots__ = ("_labels", "_live", "_num_done", "_num_rounds", "_shown_s", "_starting",
                 "_tallies", "_tally")  # fmt: skip

    def __init__(self, console: Console, labels: Sequence[str], num_rounds: int = 1) -> None:
        self._labels = labels
        self._num_rounds = num_rounds
        self._num_done: Counter[str] = Counter()
        self._tallies: dict[str, Tally] = {}
        self._tally: Tally | None = None
        self._starting: str | None = None
        self._shown_s = 0.0
        # Refreshed here: a thread of Live's own would hold the driver up when it likes.
        self._live = Live(get_renderable=self.render, console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tally = self._starting = None
        self._live.stop()

    def starting(self, label: str) -> None:
        self._starting, self._tally = label, None
        self._tallies.pop(label, None)
        self._live.refresh()

    def update(self, tally: Tally) -> None:
        self._starting, self._tally = None, tally
        self._tallies[tally.label] = tally
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._live.refresh()

    def finished(self, tally: Tally, note: str = "") -> None:
        self._num_done[tally.label] += 1
        self._tallies[tally.label] = tally
        self._starting = self._tally = None
        self._live.refresh()

    def render(self) -> Group:
        """Build what the terminal shows now."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("")
        if self._num_rounds > 1:
            table.add_column("rounds", justify="right", no_wrap=True)
        table.add_column("", min_width=_BAR_WIDTH, no_wrap=True)
        for name in ("turns", "TTFT p50", "p90", "p99", "hit", "recomp.", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for label in self._labels:
            self._add_row(table, label)
        return Group(table, Text(), self._below())

    def _add_row(self, table: Table, label: str) -> None:
        tally = self._tallies.get(label)
        rounds = []
        if self._num_rounds > 1:
            rounds = [f"{self._num_done[label]}/{self._num_rounds}"]
        if tally is None:
            state = "starting …" if label == self._starting else "to come"
            table.add_row(Text(label), *rounds, Text(state, style="dim"), *[""] * 7)
            return
        turns = Text(f"{tally.num_done}/{tally.total_turns}")
        if tally.errors:
            turns.append(f" {tally.num_errors} failed", style="bold red")
        table.add_row(
            Text(label, style="bold" if tally is self._tally else ""),
            *rounds,
            ProgressBar(
                total=max(1, tally.total_turns), completed=tally.num_done, width=_BAR_WIDTH
            ),
            turns,
            *(duration(tally.ttft_s(share)) for share in _SHARES),
            ratio(tally.hit_ratio),
            thousands(tally.num_recomputed_tokens),
            clock(tally.elapsed_s),
        )

    def _below(self) -> Group:
        tally = self._tally
        if tally is None:
            return Group()
        errors = []
        if tally.errors:
            errors.append(Text(f"errors: {error_counts(tally.errors)}", style="bold red"))
        return Group(_state(tally), *errors)


def _state(tally: Tally) -> Text:
    recent = tally.recent_ttfts()
    shown = " ".join(duration(percentile(recent, share)) for share in _SHARES)
    line = Text(f"last {RECENT_S:.0f} s: TTFT {shown}   late p99 {duration(tally.late_s(0.99))}")
    if tally.num_in_flight:
        line.append(f"   {tally.num_in_flight} in flight")
    left_s = tally.left_s()
    if left_s is not None:
        line.append(f"   about {clock(left_s)} left")
    return line


def error_counts(errors: Mapping[str, int]) -> str:
    """Write errors by kind, the most frequent first."""
    ordered = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{kind} {count}" for kind, count in ordered)
