"""What is shown while runs go on: bars on a terminal, lines if the output is not one."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loadtest import results
from loadtest.results import TurnResult
from loadtest.words import duration, ratio

_LINE_EVERY_S: Final = 5.0
_REFRESH_S: Final = 0.25
_BAR_WIDTH: Final = 18
_SHARES: Final = (0.5, 0.9, 0.99)


class Tally:
    """Running figures of one run. Warm-up turns are counted, but not timed.

    The run sets `elapsed_s`.
    """

    __slots__ = ("_lates", "_num_cached_tokens", "_num_prompt_tokens", "_ttfts", "elapsed_s",
                 "errors", "label", "num_done", "num_sent", "total_turns")  # fmt: skip

    def __init__(self, label: str, total_turns: int) -> None:
        self.label = label
        self.total_turns = total_turns
        self.num_sent = 0
        self.num_done = 0
        self.errors: Counter[str] = Counter()
        self.elapsed_s = 0.0
        self._num_prompt_tokens = 0  # of turns whose cached tokens are known
        self._num_cached_tokens = 0
        self._ttfts: list[float] = []
        self._lates: list[float] = []

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens among prompt tokens; None: not known yet."""
        if not self._num_prompt_tokens:
            return None
        return self._num_cached_tokens / self._num_prompt_tokens

    def send(self) -> None:
        """Count a turn that is sent."""
        self.num_sent += 1

    def advance(self, num_turns: int) -> None:
        """Count turns that are done and whose results come later; may be called in a thread."""
        self.num_done += num_turns

    def add(self, result: TurnResult, *, advances: bool = True) -> None:
        """Count a turn's result; without `advances` it was counted before."""
        self.num_done += advances
        insort(self._lates, result.late_s)
        if result.error is not None:
            self.errors[result.error] += 1
            return
        if result.is_warm_up:
            return
        if result.num_cached_tokens is not None and result.num_prompt_tokens is not None:
            self._num_prompt_tokens += result.num_prompt_tokens
            self._num_cached_tokens += result.num_cached_tokens
        if result.ttft_s is not None:
            insort(self._ttfts, result.ttft_s)

    def figures(self) -> str:
        """Write the figures in one line of at most 80 columns (longer with errors)."""
        times = [f"p{100 * s:.0f} {duration(percentile(self._ttfts, s))}" for s in _SHARES]
        parts = [f"TTFT {' '.join(times)}", f"hit {ratio(self.hit_ratio)}"]
        late_s = percentile(self._lates, 0.99)
        if late_s:  # never in virtual time
            parts.append(f"late p99 {duration(late_s)}")
        if self.num_sent > self.num_done:
            parts.append(f"{self.num_sent - self.num_done} in flight")
        if self.errors:
            counts = ", ".join(f"{kind} {count}" for kind, count in self.errors.most_common())
            parts.append(f"FAILED {counts}")
        return "  ".join(parts)


class Display:
    """Shows one run after the other; a context, so that a terminal is left as it was.

    Args:
        labels: Of the runs: policies, targets or variants. Each has a bar with its latest run.
        num_rounds: How often each label runs.
    """

    __slots__ = ("_bars", "_console", "_due_s", "_num_done", "_num_runs", "_progress", "_shown_s",
                 "_width")  # fmt: skip

    def __init__(self, console: Console, labels: Sequence[str], num_rounds: int = 1) -> None:
        self._console = console
        self._num_runs = len(labels) * num_rounds
        self._num_done = 0
        self._due_s = _LINE_EVERY_S
        self._shown_s = 0.0
        self._width = max(map(len, labels)) if len(labels) > 1 else 0
        # A thread that refreshes by itself would delay the driver.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._bars = {
            label: self._progress.add_task(label, total=None, figures="to come") for label in labels
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def starting(self, label: str) -> None:
        """Show that a run is being prepared: its processes start."""
        self._due_s = _LINE_EVERY_S
        self._progress.update(self._bars[label], completed=0, figures="starting …", refresh=True)
        self._print(f"{label}: starting replicas and router, caches cold")

    def update(self, tally: Tally) -> None:
        """Show newer figures of the run; may be called at every turn, in any thread."""
        if self._progress.disable:
            if tally.elapsed_s >= self._due_s:
                self._due_s = tally.elapsed_s + _LINE_EVERY_S
                self._print(self._line(tally))
            return
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._draw(tally)

    def finished(self, tally: Tally, note: str = "") -> None:
        """Show the run's last figures, and what is to be said of it."""
        self._num_done += 1
        self._due_s = _LINE_EVERY_S
        self._draw(tally)
        place = f"{self._num_done}/{self._num_runs}" if self._num_runs > 1 else ""
        self._print(self._line(tally, place, note or "done"))

    def _draw(self, tally: Tally) -> None:
        self._progress.update(
            self._bars[tally.label],
            total=tally.total_turns,
            completed=tally.num_done,
            figures=tally.figures(),
            refresh=True,
        )

    def _line(self, tally: Tally, place: str = "", note: str = "") -> str:
        name = f"{tally.label:<{self._width}}" if self._width else ""
        figures = f"{tally.elapsed_s:4.0f} s  {tally.num_done}/{tally.total_turns}"
        return "  ".join(filter(None, (name, place, figures, tally.figures(), note)))

    def _print(self, line: str) -> None:
        if self._progress.disable:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Pick the nearest-rank percentile of sorted values; None of none: unknown is no 0."""
    return results.percentile(ordered, share) if ordered else None
