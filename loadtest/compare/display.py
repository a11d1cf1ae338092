"""What is to be seen while it runs: every arm's rounds and figures so far."""

from __future__ import annotations

from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.compare.setting import Setting
from loadtest.demo.tally import Tally
from loadtest.results import Run, TurnResult, summarize
from loadtest.words import milliseconds, ratio

_REFRESHES_PER_S: Final = 4
_BAR_WIDTH: Final = 16


class Display(Protocol):
    """Shows one run after the other; a context, so that a terminal is left as it was."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def begin(self, label: str, number: int) -> None:
        """Say that an arm's run of a round begins."""
        ...

    def advance(self, num_turns: int) -> None:
        """Count turns done; may be called in another thread."""
        ...

    def add(self, turn: TurnResult) -> None:
        """Take a turn's result, for the figures."""
        ...

    def end(self, run: Run) -> None:
        """Say that the run is over."""
        ...


def make_display(console: Console, setting: Setting) -> Display:
    """Choose bars for a terminal, lines for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, setting)
    return PlainDisplay(console, setting)


class PlainDisplay:
    """One line per run; for logs."""

    __slots__ = ("_console", "_num_done", "_setting")

    def __init__(self, console: Console, setting: Setting) -> None:
        self._console = console
        self._setting = setting
        self._num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def begin(self, label: str, number: int) -> None:
        return None

    def advance(self, num_turns: int) -> None:
        return None

    def add(self, turn: TurnResult) -> None:
        return None

    def end(self, run: Run) -> None:
        self._num_done += 1
        width = max(map(len, self._setting.labels))
        line = f"{self._num_done:>3}/{self._setting.num_runs}  round {run.info.round}  "
        line += f"{run.info.label:<{width}}  {run_line(run)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_line(run: Run) -> str:
    """Put a run's figures into one line."""
    summary = summarize(run.turns)
    parts = [
        f"{summary.num_turns:>5} turns",
        f"TTFT {summary.ttft_mean_s * 1e3:,.0f} ms, P90 {summary.ttft_p90_s * 1e3:,.0f}",
        f"hit {ratio(summary.hit_ratio)}",
    ]
    if summary.num_errors:
        parts.append(f"FAILED {summary.num_errors}")
    if not run.info.is_complete:
        parts.append(f"NOT COMPLETE: {run.info.note}")
    return "  ".join(parts)


class LiveDisplay:
    """A row per arm: rounds, the bar of its current run, figures of all its turns so far."""

    __slots__ = ("_current", "_live", "_num_current", "_num_rounds", "_setting", "_tallies")

    def __init__(self, console: Console, setting: Setting) -> None:
        total = setting.num_turns or 0
        self._setting = setting
        self._tallies = {label: Tally(label, total, 0) for label in setting.labels}
        self._num_rounds = dict.fromkeys(setting.labels, 0)
        self._current: str | None = None
        self._num_current = 0
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=_REFRESHES_PER_S
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._current = None
        self._live.stop()

    def begin(self, label: str, number: int) -> None:
        self._current, self._num_current = label, 0

    def advance(self, num_turns: int) -> None:
        self._num_current += num_turns

    def add(self, turn: TurnResult) -> None:
        if self._current is not None and not turn.is_warm_up:
            self._tallies[self._current].add(turn)

    def end(self, run: Run) -> None:
        self._num_rounds[run.info.label] += 1
        self._current = None

    def render(self) -> Table:
        """Build what the terminal shows now."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("arm", no_wrap=True)
        table.add_column("rounds", justify="right", no_wrap=True)
        table.add_column("now", min_width=_BAR_WIDTH, no_wrap=True)
        for name in ("turns", "TTFT P50", "P90", "P99", "hit", "failed"):
            table.add_column(name, justify="right", no_wrap=True)
        for label in self._setting.labels:
            self._add_row(table, label, self._tallies[label])
        return table

    def _add_row(self, table: Table, label: str, tally: Tally) -> None:
        is_current = label == self._current
        total = self._setting.num_turns or 1
        bar = ProgressBar(total=total, completed=self._num_current, width=_BAR_WIDTH)
        table.add_row(
            Text(label, style="bold" if is_current else ""),
            f"{self._num_rounds[label]}/{len(self._setting.order)}",
            bar if is_current else "",
            f"{tally.num_turns:,}",
            *(milliseconds(tally.ttft_s(share)) for share in (0.5, 0.9, 0.99)),
            ratio(tally.hit_ratio),
            Text(str(tally.num_errors), style="bold red" if tally.num_errors else "dim"),
        )
