"""`warmroute top`: a running router, live in the terminal."""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from router.cli.admin import Admin, admin_options, echo_json
from router.cli.figures import again, bar, clock, duration, listed, share
from router.cli.status import (
    State,
    degraded,
    headline,
    queue_line,
    recent,
    replica_table,
    tokens_line,
)
from router.cli.terminal import grid, one_line
from router.cli.watch import watched

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

_MAX_DECISIONS: Final = 50
_MAX_FINDINGS: Final = 2
_MAX_WRONG: Final = 3
_MINUTE_S: Final = 60.0
_FIXED: Final = 11  # lines of a screen that are headings and blanks


@click.command()
@admin_options
def top(admin: Admin) -> None:
    """Watch a running router: replicas, queue, causes, sessions.

    Shows load and cache fill of each replica, the queue, tokens by cause in the last minute, the
    sessions that cost most and the last requests. Ctrl-C ends it. --json prints one state a second.
    """
    screen = Screen()
    try:
        if admin.as_json:
            _print_states(admin)
        elif sys.stdout.isatty():
            _draw(admin, screen)
        else:
            raise click.UsageError("top needs a terminal; `warmroute status` shows it once")
    except KeyboardInterrupt:
        return


def _print_states(admin: Admin) -> None:
    for line in watched(admin, "live"):
        if line["kind"] == "state":
            echo_json(line, indent=None)


def _draw(admin: Admin, screen: Screen) -> None:
    from rich.console import Console  # late: `--help` should not wait for it
    from rich.live import Live

    console = Console(highlight=False)
    lines = watched(admin, "live")
    screen.take(next(lines))  # a router that is not there is said on the usual screen
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for line in lines:
            if screen.take(line):
                live.update(screen.drawn(console), refresh=True)


class Screen:
    """What is shown: the last state, and the last decisions."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_MAX_DECISIONS)
        self._gone: str | None = None

    def take(self, line: dict[str, Any]) -> bool:
        """Record a line of the feed; return whether to draw again."""
        match line["kind"]:
            case "decision":
                self._decisions.appendleft(line)
                return False
            case "state":
                self._state, self._gone = line, None
            case "gone":
                self._gone = line["why"]
        return True

    def drawn(self, console: Console) -> Group:
        """Draw as much as the screen has room for."""
        from rich.console import Group  # late, as in `_draw`
        from rich.text import Text

        parts: list[Any] = []
        if self._gone is not None:
            parts.append(Text(f"the router is gone, trying again: {self._gone}", "bold red"))
        if self._state is None:
            return Group(*parts, Text("waiting for the router …"))
        notes = [
            *(Text(f"✗ {each}", "red") for each in islice(degraded(self._state), _MAX_WRONG)),
            *(
                Text(f"! {one_line(each['text'])}", "yellow")
                for each in self._state["findings"][:_MAX_FINDINGS]
            ),
        ]
        rows = max(6, console.size.height - _FIXED - len(parts) - len(notes))
        num_replicas = min(len(self._state["replicas"]["shown"]) + 2, rows // 3)
        num_sessions = min(len(self._state["sessions"]["shown"]), (rows - num_replicas) // 2)
        tokens, _ = recent(self._state, _MINUTE_S)
        parts += [
            Text(headline(self._state), "bold"),
            replica_table(self._state, num_replicas),
            Text(""),
            Text(queue_line(self._state)),
            tokens_line(tokens, "tokens of the last minute"),
            *notes,
            Text(""),
            _session_table(self._state, num_sessions),
            Text(""),
            self._decision_table(rows - num_replicas - num_sessions),
        ]
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*parts)

    def _decision_table(self, most: int) -> Table:
        table = grid(
            "ended", "session", "replica",
            right=("tokens", "cached", "TTFT", "queue"), last="again",
        )  # fmt: skip
        for line in list(self._decisions)[:most]:
            cached = line["cached"] if line["reported"] is None else line["reported"]
            table.add_row(
                clock(line["at"]),
                line["session"] or "-",
                line["replica"],
                f"{line['tokens']:,}",
                share(cached, line["tokens"]),
                duration(line["ttft_ms"]),
                duration(line["waited_ms"]),
                _why(line),
            )
        return table


def _why(line: dict[str, Any]) -> Text:
    from rich.text import Text  # late, as in `_draw`

    if line["outcome"] != "ok":
        return Text(line["outcome"], "red")
    return Text(listed(again(line["causes"])), "yellow", no_wrap=True, overflow="ellipsis")


def _session_table(state: State, most: int) -> Table:
    table = grid(
        "session",
        "home",
        "cached",
        right=("turns", "tokens", "engine s", "waited s"),
        last="mostly",
    )
    for each in state["sessions"]["shown"][:most]:
        sources = each["sources"]
        cached = sources["gpu"] + sources["cpu"] + sources["pool"]
        table.add_row(
            each["session"],
            each["home"],
            bar(cached / each["prompt_tokens"] if each["prompt_tokens"] else None),
            f"{each['turns']:,}",
            f"{each['prompt_tokens']:,}",
            f"{each['engine_s']:,.1f}",
            f"{each['waited_s']:,.1f}",
            next(iter(again(each["causes"])), ""),
        )
    return table
