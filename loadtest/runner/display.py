"""What is shown while a run goes on: a bar on a terminal, lines if the output is not one."""

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


class Display:
    """Running figures of one run; a context, so that a terminal is left as it was.

    Warm-up turns are counted, but not timed.
    """

    __slots__ = ("_bar", "_console", "_due_s", "_errors", "_lates", "_num_cached_tokens",
                 "_num_done", "_num_prompt_tokens", "_num_sent", "_num_turns", "_progress",
                 "_shown_s", "_ttfts")  # fmt: skip

    def __init__(self, console: Console, label: str, num_turns: int) -> None:
        self._console = console
        self._num_turns = num_turns
        self._num_sent = self._num_done = 0
        self._errors: Counter[str] = Counter()
        self._num_prompt_tokens = 0  # of turns whose cached tokens are known
        self._num_cached_tokens = 0
        self._ttfts: list[float] = []
        self._lates: list[float] = []
        self._due_s = _LINE_EVERY_S
        self._shown_s = 0.0
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
        self._bar = self._progress.add_task(label, total=num_turns, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def send(self) -> None:
        """Count a turn that is sent."""
        self._num_sent += 1

    def add(self, result: TurnResult, elapsed_s: float) -> None:
        """Count a turn's result, so many seconds after the start."""
        self._num_done += 1
        insort(self._lates, result.late_s)
        if result.error is not None:
            self._errors[result.error] += 1
        elif not result.is_warm_up:
            if result.num_cached_tokens is not None and result.num_prompt_tokens is not None:
                self._num_prompt_tokens += result.num_prompt_tokens
                self._num_cached_tokens += result.num_cached_tokens
            if result.ttft_s is not None:
                insort(self._ttfts, result.ttft_s)
        if self._progress.disable:
            if elapsed_s >= self._due_s:
                self._due_s = elapsed_s + _LINE_EVERY_S
                self.print(elapsed_s)
            return
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._progress.update(
                self._bar, completed=self._num_done, figures=self.figures(), refresh=True
            )

    def print(self, elapsed_s: float, note: str = "") -> None:
        """Write a line with all figures, if the output is no terminal."""
        if self._progress.disable:
            figures = f"{elapsed_s:4.0f} s  {self._num_done}/{self._num_turns}"
            line = "  ".join(filter(None, (figures, self.figures(), note)))
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def figures(self) -> str:
        """Write the figures in one line of at most 80 columns (longer with errors)."""
        times = [f"p{100 * s:.0f} {duration(percentile(self._ttfts, s))}" for s in _SHARES]
        known = self._num_prompt_tokens
        hits = ratio(self._num_cached_tokens / known if known else None)
        parts = [f"TTFT {' '.join(times)}", f"hit {hits}"]
        if late_s := percentile(self._lates, 0.99):
            parts.append(f"late p99 {duration(late_s)}")
        if self._num_sent > self._num_done:
            parts.append(f"{self._num_sent - self._num_done} in flight")
        if self._errors:
            counts = ", ".join(f"{kind} {count}" for kind, count in self._errors.most_common())
            parts.append(f"FAILED {counts}")
        return "  ".join(parts)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Pick the nearest-rank percentile of sorted values; None of none: unknown is no 0."""
    return results.percentile(ordered, share) if ordered else None
