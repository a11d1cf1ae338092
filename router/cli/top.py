"""`warmroute top`: a running router, live in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from router.base.bounded import Bounded
from router.cli.admin import Admin, admin_options, echo_json
from router.cli.columns import Column, explained, fitted, without_empty
from router.cli.figures import (
    again,
    bar,
    cell_of_duration,
    clock,
    listed,
    money,
    session_name,
    share,
    titles,
)
from router.cli.status import (
    REPLICA_COLUMNS,
    State,
    degraded,
    headline,
    queue_line,
    recent,
    replica_table,
    tokens_line,
)
from router.cli.terminal import one_line
from router.cli.watch import watched

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

_MAX_DECISIONS: Final = 50
_MAX_FINDINGS: Final = 2
_MAX_WRONG: Final = 3
_MINUTE_S: Final = 60.0
_LEAST_ROWS: Final = 6
_BLANKS_AND_HEADINGS: Final = 6  # of three tables
_LAST: Final = "last=20"  # requests that ended before


SESSION_COLUMNS: Final = (
    Column("session", "its name here, or its client's id if session.show_ids is on"),
    Column("home", "the replica of its last turn", 3),
    Column("cached", "prompt tokens that a cache had", 4),
    Column("turns", "answered requests", 7, is_right=True),
    Column("tokens", "of all its prompts", 6, is_right=True),
    Column("GPU-s", "seconds of replicas: prompts and its share of decoding", is_right=True),
    Column("cost", "of these, if replicas have a cost_per_hour", 1, is_right=True),
    Column("saved-s", "seconds that caches saved", 2, is_right=True),
    Column("waited-s", "seconds in the queue", 8, is_right=True),
    Column("again", "main cause of tokens that were computed again", 5, is_text=True),
)
REQUEST_COLUMNS: Final = (
    Column("ended", "time of day"),
    Column("session", "as above", 2),
    Column("replica", "that answered it"),
    Column("tokens", "of its prompt", 3, is_right=True),
    Column("cached", "share of these that a cache had", is_right=True),
    Column("TTFT", "time to first token", 1, is_right=True),
    Column("queue", "time in the router's queue", 4, is_right=True),
    Column("again", "tokens computed again, by cause; or how it failed", is_text=True),
)


@click.command(
    epilog=explained(replicas=REPLICA_COLUMNS, sessions=SESSION_COLUMNS, requests=REQUEST_COLUMNS)
)
@admin_options
def top(admin: Admin) -> None:
    """Watch a running router: replicas, queue, causes, sessions.

    Shows load and cache fill of each replica, the queue, tokens by cause in the last minute, the
    sessions that cost most and the last requests. A narrow terminal shows fewer columns. Ctrl-C
    ends it. --json prints one state a second.
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
    lines = watched(admin, f"live?{_LAST}")
    screen.take(next(lines))  # a router that is not there is said on the usual screen
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for line in lines:
            if screen.take(line):
                live.update(screen.drawn(console), refresh=True)


class Screen:
    """What is shown: the last state, and the last decisions."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._decisions: Bounded[tuple[str, float], dict[str, Any]] = Bounded(_MAX_DECISIONS)
        """Requests by id and end: a new feed begins with the last ones."""
        self._gone: str | None = None

    def take(self, line: dict[str, Any]) -> bool:
        """Record a line of the feed; return whether to draw again."""
        match line["kind"]:
            case "decision":
                self._decisions.put((line["request"], line["at"]), line)
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

        head: list[Text] = []
        if self._gone is not None:
            head.append(Text(f"the router is gone, trying again: {self._gone}", "bold red"))
        state, width = self._state, console.width
        if state is None:
            return Group(*head, Text("waiting for the router …"))
        tokens, _ = recent(state, _MINUTE_S)
        head += [Text(headline(state, width), "bold")]
        notes = [Text(queue_line(state)), tokens_line(tokens, "tokens of the last minute")]
        wrong = [Text(f"✗ {each}", "red") for each in islice(degraded(state), _MAX_WRONG)]
        wrong += [
            Text(f"! {one_line(each['text'])}", "yellow")
            for each in state["findings"][:_MAX_FINDINGS]
        ]
        rows = self._room(console, [*head, *notes, *wrong])
        if rows < _LEAST_ROWS and len(wrong) > 1:  # whole lines of advice, and requests below
            wrong[1:] = [Text(f"! {len(wrong) - 1} more: warmroute status", "yellow")]
            rows = max(_LEAST_ROWS, self._room(console, [*head, *notes, *wrong]))
        names, sessions = titles(state), state["sessions"]["shown"]
        num_replicas = min(_num_lines(state["replicas"]), max(2, rows // 3))
        num_requests = max(1, min(len(self._decisions), (rows - num_replicas + 1) // 2))
        num_sessions = max(1, min(len(sessions), rows - num_replicas - num_requests))
        return Group(
            *head,
            replica_table(state, num_replicas, width),
            Text(""),
            *notes,
            *wrong,
            Text(""),
            session_table(sessions[:num_sessions], width, names),
            Text(""),
            self._decision_table(max(1, rows - num_replicas - num_sessions), width, names),
        )

    def _room(self, console: Console, texts: Sequence[Text]) -> int:
        """Return how many rows the three tables have together, below so much text."""
        num_lines = sum([len(each.wrap(console, console.width)) for each in texts])
        height: int = console.height
        return height - num_lines - _BLANKS_AND_HEADINGS

    def _decision_table(self, most: int, width: int, names: Mapping[str, str]) -> Table:
        newest = islice(reversed(self._decisions.values()), most)
        return fitted(REQUEST_COLUMNS, [request_row(each, names) for each in newest], width)


def _num_lines(replicas: dict[str, Any]) -> int:
    """Count the rows of all replicas, with one that says how many are not described."""
    num_shown = len(replicas["shown"]) + len(replicas["missing"])
    is_cut: bool = replicas["total"] + replicas["num_missing"] > num_shown
    return num_shown + is_cut


def request_row(line: dict[str, Any], names: Mapping[str, str]) -> list[str | Text]:
    """Return the cells of a request, as `REQUEST_COLUMNS` names them."""
    from rich.text import Text  # late, as in `_draw`

    cached = line["cached"] if line["reported"] is None else line["reported"]
    is_well = line["outcome"] == "ok"
    return [
        clock(line["at"]),
        session_name(line["session"], names),
        line["replica"],
        f"{line['tokens']:,}",
        share(cached, line["tokens"]),
        cell_of_duration(line["ttft_ms"]),
        cell_of_duration(line["waited_ms"]),
        Text(listed(again(line["causes"])), "yellow") if is_well else Text(line["outcome"], "red"),
    ]


def session_table(
    sessions: Sequence[dict[str, Any]], width: int, names: Mapping[str, str]
) -> Table:
    """Draw a row a session."""
    rows: list[list[str | Text]] = []
    for each in sessions:
        sources = each["sources"]
        cached = sources["gpu"] + sources["cpu"] + sources["pool"]
        rows.append(
            [
                session_name(each["session"], names),
                each["home"],
                bar(cached / each["prompt_tokens"] if each["prompt_tokens"] else None, 6),
                f"{each['turns']:,}",
                f"{each['prompt_tokens']:,}",
                f"{each.get('gpu_s', each['engine_s']):,.1f}",
                money(each.get("cost")),
                f"{each['saved_s']:,.1f}",
                f"{each['waited_s']:,.1f}",
                next(iter(again(each["causes"])), ""),
            ]
        )
    return without_empty(SESSION_COLUMNS, rows, width)
