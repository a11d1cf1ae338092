"""The command line and the progress bar of a study."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.runner.children import ChildDied


def measured(measure: Callable[[Progress], None], console: Console) -> int:
    """Measure with a progress bar; return the exit status: 130 after Ctrl-C, 1 if it failed.

    The caller shows results so far.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        try:
            measure(progress)
        except KeyboardInterrupt:
            console.print("stopped: what is done follows", style="yellow")
            return 130
        except (ChildDied, FileNotFoundError, RuntimeError, TimeoutError) as exc:
            console.print(str(exc), style="red", markup=False)
            return 1
    return 0


def add_arms(asked: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the option that names variants, as `loadtest.compare.arms.arm_of` reads them."""
    asked.add_argument(
        "--arms", nargs="+", default=default, metavar="POLICY[:PARAM=VALUE,…]",
        help="policies by label, with the queue as it is by default; queue.KEY=VALUE: with "
        "another, queue.mode=off: with none",
    )  # fmt: skip


def interrupt_on_sigterm() -> None:
    """End a run on SIGTERM as Ctrl-C does, and on Ctrl-C even where it was set to be ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
