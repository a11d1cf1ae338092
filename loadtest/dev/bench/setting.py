"""The setting of a benchmark: how much to do, with which model, and a progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.progress import Progress

_T = TypeVar("_T")

TINY_MODEL = Path(__file__).resolve().parent.parent.parent / "tiny_model"


class Setting:
    """How to run.

    Args:
        quick: Small numbers: a check that it runs, not a measurement.
        model_dir: Tokenizer and template that the replicas serve.
        work_dir: For logs of the processes that are started.
        progress: Where steps are shown.
    """

    __slots__ = ("model_dir", "progress", "quick", "work_dir")

    def __init__(
        self,
        *,
        work_dir: Path,
        progress: Progress,
        quick: bool = False,
        model_dir: Path = TINY_MODEL,
    ) -> None:
        self.quick = quick
        self.model_dir = model_dir
        self.work_dir = work_dir
        self.progress = progress

    def size(self, full: int, quick: int) -> int:
        """Choose how many."""
        return quick if self.quick else full

    def track(self, steps: Sequence[_T], what: str) -> Iterator[_T]:
        """Yield the steps and show how far they are; the bar goes when they are done."""
        task = self.progress.add_task(what, total=len(steps))
        try:
            for step in steps:
                yield step
                self.progress.advance(task)
        finally:
            self.progress.remove_task(task)
