"""What is to be seen while it runs: bars on a terminal, plain lines where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.demo.tally import ReplicaLoad, Tally
from loadtest.words import milliseconds, ratio, thousands

_REFRESHES_PER_S: Final = 4
_LINE_EVERY_S: Final = 5.0
_BAR_WIDTH: Final = 18
_LOAD_CELLS: Final = 24
_NAMED_CELLS: Final = 14  # the longest policy name


class Display(Protocol):
    """Shows one policy after the other; a context, so that a terminal is left as it was."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def starting(self, policy: str) -> None:
        """Say that replicas and router for `policy` are being started."""
        ...

    def update(self, tally: Tally) -> None:
        """Show newer numbers; may be called at every turn."""
        ...

    def finished(self, tally: Tally) -> None:
        """Show a run's last numbers."""
        ...


def make_display(console: Console, policies: list[str]) -> Display:
    """Choose bars for a terminal, lines for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, policies)
    return PlainDisplay(console)


class PlainDisplay:
    """One line every few seconds; for logs."""

    __slots__ = ("_console", "_due_s")

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def starting(self, policy: str) -> None:
        self._due_s = _LINE_EVERY_S
        self._say(f"{policy}: starting three replicas and a router, caches cold")

    def update(self, tally: Tally) -> None:
        if tally.elapsed_s >= self._due_s:
            self._due_s = tally.elapsed_s + _LINE_EVERY_S
            self._say(f"{tally.elapsed_s:5.0f} s  {progress_line(tally)}")

    def finished(self, tally: Tally) -> None:
        self._say(f"{tally.elapsed_s:5.0f} s  {progress_line(tally)}  done")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_line(tally: Tally) -> str:
    """Put a run's numbers into one line of about 90 columns."""
    parts = [
        f"{tally.num_turns:>4}/{tally.total_turns}",
        f"TTFT {milliseconds(tally.ttft_s(0.5))}, p90 {milliseconds(tally.ttft_s(0.9))}",
        f"hit {ratio(tally.hit_ratio)}",
        f"recomp. {thousands(tally.num_recomputed_tokens)}",
        "load " + " ".join(f"{x.num_running}+{x.num_waiting}" for x in tally.loads),
    ]
    if tally.num_errors:
        parts.append(f"FAILED {tally.num_errors}")
    return "  ".join(parts)


class LiveDisplay:
    """A row per policy with its bar, and the replicas of the one that runs."""

    __slots__ = ("_live", "_policies", "_starting", "_tallies", "_tally")

    def __init__(self, console: Console, policies: list[str]) -> None:
        self._policies = policies
        self._tallies: dict[str, Tally] = {}
        self._tally: Tally | None = None
        self._starting: str | None = None
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tally = self._starting = None
        self._live.stop()

    def starting(self, policy: str) -> None:
        self._starting, self._tally = policy, None

    def update(self, tally: Tally) -> None:
        self._starting, self._tally = None, tally
        self._tallies[tally.policy] = tally

    def finished(self, tally: Tally) -> None:
        self.update(tally)
        self._tally = None

    def render(self) -> Group:
        """Build what the terminal shows now."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("policy", min_width=_NAMED_CELLS, no_wrap=True)
        table.add_column("turns", min_width=_BAR_WIDTH, no_wrap=True)
        for name in ("", "TTFT p50", "p90", "p99", "hit", "recomp.", "s"):
            table.add_column(name, justify="right", no_wrap=True)
        for policy in self._policies:
            self._add_row(table, policy)
        return Group(table, Text(), self._below())

    def _add_row(self, table: Table, policy: str) -> None:
        tally = self._tallies.get(policy)
        if tally is None:
            state = "starting …" if policy == self._starting else "to come"
            table.add_row(policy, Text(state, style="dim"), *[""] * 7)
            return
        turns = Text(f"{tally.num_turns}/{tally.total_turns}")
        if tally.num_errors:
            turns.append(f" {tally.num_errors} failed", style="bold red")
        table.add_row(
            Text(policy, style="bold" if tally is self._tally else ""),
            ProgressBar(total=tally.total_turns, completed=tally.num_turns, width=_BAR_WIDTH),
            turns,
            milliseconds(tally.ttft_s(0.5)),
            milliseconds(tally.ttft_s(0.9)),
            milliseconds(tally.ttft_s(0.99)),
            ratio(tally.hit_ratio),
            thousands(tally.num_recomputed_tokens),
            f"{tally.elapsed_s:.0f}",
        )

    def _below(self) -> Group:
        if self._tally is None:
            return Group(*[Text()] * 3)  # the same height, so that nothing jumps
        return Group(*(_load_line(i, load) for i, load in enumerate(self._tally.loads)))


def _load_line(number: int, load: ReplicaLoad) -> Text:
    running = min(load.num_running, _LOAD_CELLS)
    waiting = min(load.num_waiting, _LOAD_CELLS - running)
    line = Text(f"r{number + 1}  ")
    line.append("█" * running, style="green")
    line.append("█" * waiting, style="yellow")
    line.append("·" * (_LOAD_CELLS - running - waiting), style="dim")
    line.append(
        f"  {load.num_running:>2} running  {load.num_waiting:>2} waiting"
        f"  {thousands(load.num_recomputed_tokens):>6} prompt tokens computed"
    )
    return line
