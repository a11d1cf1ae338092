"""`warmroute tail`: requests as they end, from the feed of the admin port."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from router.api.sessions import engine_name, session_hash
from router.base.bounded import Bounded
from router.cli.admin import Admin, NoRouter, Refused, admin_options, echo_json
from router.cli.columns import GAP, Column, cut, explained, shown
from router.cli.figures import (
    again,
    cell_of_duration,
    cell_of_name,
    clock,
    listed,
    num,
    session_name,
    share,
    titles,
)
from router.cli.status import routers
from router.cli.terminal import one_line

PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)  # between tries; the last one again and again
_MOST: Final = "live?per_s=500"


def watched(admin: Admin, path: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a feed, for good. A router that goes away is tried again.

    Lines of ours say so: `{"kind": "gone", "why": …}`, then `{"kind": "back"}`.

    Raises:
        NoRouter, Refused: it was not there at first, or does not let us in.
    """
    has_begun, num_failed = False, 0
    while True:
        try:
            for line in admin.lines(path):
                if num_failed:
                    yield {"kind": "back"}
                has_begun, num_failed = True, 0
                yield line
            why = "the router ended the stream"
        except (NoRouter, Refused) as exc:
            if not has_begun or (isinstance(exc, Refused) and exc.status < 500):
                raise
            why = exc.message
        if not num_failed:
            yield {"kind": "gone", "why": why}
        time.sleep(PAUSES_S[min(num_failed, len(PAUSES_S) - 1)])
        num_failed += 1


COLUMNS: Final = (
    Column("ended", "time of day"),
    Column("session", "its name here, or its client's id if session.show_ids is on", 2),
    Column("replica", "that answered it"),
    Column("tokens", "of its prompt", 3, is_right=True),
    Column("cached", "share of these that a cache had; ~ if only predicted", is_right=True),
    Column("TTFT", "time to first token", 1, is_right=True),
    Column("queue", "time in the router's queue", 4, is_right=True),
    Column("tenant", "whose request it was", 5),
    Column("why", "tokens computed again, by cause; or how it failed", is_text=True),
)
_WIDTHS: Final = (8, 16, 7, 7, 6, 6, 6, 8, 24)
_LEAST_WHY: Final = 16
_MAX_NAMES: Final = 1_000


@click.command(epilog=explained(requests=COLUMNS))
@click.option(
    "--session", metavar="SESSION", help="Only this session: its name here, or the client's id."
)
@click.option("--tenant", metavar="NAME", help="Only requests of this tenant.")
@click.option("--replica", metavar="NAME", help="Only requests to this replica.")
@admin_options
def tail(session: str | None, tenant: str | None, replica: str | None, admin: Admin) -> None:
    """Follow requests: a line for each that ends.

    The lines have columns, the last one with spaces. A narrow terminal shows fewer. Ctrl-C ends it.
    --json prints the lines of the feed, which have every candidate's costs.
    """
    lines = Lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    lost, names, num_routers = 0, Bounded[str, str](_MAX_NAMES), 1
    has_heading = admin.as_json
    try:
        for line in watched(admin, _MOST):
            if not has_heading:
                click.echo(lines.heading)
                has_heading = True
            match line["kind"]:
                case "decision":
                    if not is_wanted(line, session, tenant, replica):
                        continue
                    if admin.as_json:
                        echo_json(line, indent=None)
                    else:
                        click.echo(lines.line(line, names))
                case "state":
                    for each in titles(line).items():
                        names.put(*each)
                    if num_routers != (num_routers := routers(line)):
                        others = "; the others' requests are not shown" if num_routers > 1 else ""
                        _say(f"one of {num(num_routers, 'router')}{others}")
                case "lost":
                    _say(f"{line['decisions'] - lost:,} requests are left out: too many a second")
                    lost = line["decisions"]
                case "gone":
                    lost = 0
                    _say(f"the router is gone, trying again: {line['why']}")
                case "back":
                    _say("the router is back")
    except KeyboardInterrupt:
        return


def is_wanted(
    line: dict[str, Any], session: str | None, tenant: str | None, replica: str | None
) -> bool:
    """Return whether a request is one of those to show; None: any is."""
    if tenant is not None and line["tenant"] != tenant:
        return False
    if replica is not None and replica not in (line["replica"], line["replica"].partition("#")[0]):
        return False
    if session is None:
        return True
    owner = f"{line['tenant']}\0" if line["tenant"] is not None else ""
    return line["session"] in (session.lower(), engine_name(session_hash(session, owner)))


class Lines:
    """Writes requests as lines below a heading, in columns that fit.

    Args:
        width: Of the terminal. None: there is none, and nothing is left out.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        names = [column.title for column in COLUMNS]
        at = range(len(COLUMNS))
        self._kept = at if width is None else shown(COLUMNS, _WIDTHS, width)
        self.heading = click.style(
            (" " * GAP).join(self._padded(i, names[i]) for i in self._kept).rstrip(), bold=True
        )

    def line(self, line: dict[str, Any], names: Mapping[str, str]) -> str:
        """Write a request of the feed as a coloured line."""
        tokens, reported = line["tokens"], line["reported"]
        causes, is_well = again(line["causes"]), line["outcome"] == "ok"
        is_costly = sum(causes.values()) > 0.2 * tokens
        colour = "red" if is_costly or not is_well else "yellow" if causes else "green"
        cached = share(line["cached"] if reported is None else reported, tokens)
        cells = [
            clock(line["at"]),
            session_name(line["session"], names),
            line["replica"],
            f"{tokens:,}",
            f"~{cached}" if reported is None and tokens else cached,
            cell_of_duration(line["ttft_ms"]),
            cell_of_duration(line["waited_ms"]),
            cell_of_name(one_line(line["tenant"])) if line["tenant"] is not None else "-",
            "",
        ]
        colours = {"session": "cyan", "cached": colour, "tenant": "bright_black", "why": colour}
        texts = [self._padded(i, cells[i]) for i in self._kept[:-1]]
        taken = sum(map(len, texts)) + GAP * len(texts)
        why = listed(causes) if is_well else line["outcome"]
        texts.append(why if self._width is None else cut(why, max(_LEAST_WHY, self._width - taken)))
        styled = [
            click.style(text, fg=colours.get(COLUMNS[i].title))
            for i, text in zip(self._kept, texts, strict=True)
        ]
        return (" " * GAP).join(styled).rstrip()

    def _padded(self, i: int, text: str) -> str:
        return f"{text:{'>' if COLUMNS[i].is_right else '<'}{_WIDTHS[i]}}"


def _say(text: str) -> None:
    click.secho(text, fg="yellow", err=True)
