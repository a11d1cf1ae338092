"""Show how far the policies are: bars on a terminal, lines in a log."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from loadtest.results import TurnResult
from loadtest.words import ratio, thousands


class Board:
    """Shows runs; a context, so that a terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, label: str, num_turns: int) -> Row:
        """Begin a run."""
        if not self._console.is_terminal:
            self._console.print(f"{label}: starting replicas and router", highlight=False)
        return Row(self._console, self._progress, label, num_turns)


class Row:
    """One run's bar."""

    __slots__ = (
        "_console",
        "_id",
        "_label",
        "_num_cached",
        "_num_done",
        "_num_prompt",
        "_progress",
    )

    def __init__(self, console: Console, progress: Progress, label: str, num_turns: int) -> None:
        self._console = console
        self._progress = progress
        self._label = label
        self._num_done = self._num_prompt = self._num_cached = 0
        self._id: TaskID = progress.add_task(label, total=num_turns, figures="starting …")

    def add(self, turn: TurnResult) -> None:
        """Count a turn."""
        self._num_done += 1
        self._num_prompt += turn.num_prompt_tokens or 0
        self._num_cached += turn.num_cached_tokens or 0
        self._progress.update(self._id, completed=self._num_done, figures=self._figures())

    def finish(self) -> None:
        """Say in a log that the run is over."""
        if not self._console.is_terminal:
            text = f"{self._label}: {self._num_done} turns, {self._figures()}"
            self._console.print(text, highlight=False)

    def _figures(self) -> str:
        share = self._num_cached / self._num_prompt if self._num_prompt else None
        return f"{thousands(self._num_prompt - self._num_cached)} recomputed, {ratio(share)} hits"
