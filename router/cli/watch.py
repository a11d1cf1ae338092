"""`warmroute tail`: requests as they end, from the feed of the admin port."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from router.api.sessions import engine_name, session_hash
from router.base.bounded import Bounded
from router.cli.admin import Admin, NoRouter, Refused, admin_options, echo_json
from router.cli.status import routers
from router.cli.terminal import (
    Cell,
    Column,
    again,
    cell_of_duration,
    cell_of_name,
    cells,
    clock,
    explained,
    listed,
    num,
    one_line,
    session_name,
    share,
    titles,
    waited,
    waiting,
)

PAUSE_S: Final = 1.0  # between tries to find a router that is gone
LONG_S: Final = 15.0  # a request that has waited for so long is named
_MAX_NAMES: Final = 1_000

# fmt: off
COLUMNS: Final = (
    Column("ended", "time of day", lambda r: clock(r["at"])),
    Column("session", "its name here, or its client's id if session.show_ids is on",
        lambda r: r["name"]),
    Column("replica", "that answered it", lambda r: r["replica"]),
    Column("tokens", "of its prompt", lambda r: f"{r['tokens']:,}", is_right=True),
    Column("cached", "share of these that a cache had; ~ if only predicted",
        lambda r: "~" * (r["reported"] is None and r["tokens"] > 0) + share(
            r["cached"] if r["reported"] is None else r["reported"], r["tokens"]), is_right=True),
    Column("TTFT", "time to first token", lambda r: cell_of_duration(r["ttft_ms"]), is_right=True),
    Column("queue", "time in the router's queue",
        lambda r: cell_of_duration(r["waited_ms"]), is_right=True),
    Column("tenant", "whose request it was", lambda r: cell_of_name(one_line(r["tenant"] or ""))),
    Column("why", "tokens computed again, by cause; or how it failed; what it waited for",
        lambda r: ", ".join(filter(None, (
            listed(again(r["causes"])) if r["outcome"] == "ok" else r["outcome"], waited(r))))),
)
# fmt: on
_WIDTHS: Final = (8, 16, 7, 7, 6, 6, 6, 8, 0)


@click.command(epilog=explained(requests=COLUMNS))
@click.option(
    "--session", metavar="SESSION", help="Only this session: its name here, or the client's id."
)
@click.option("--tenant", metavar="NAME", help="Only requests of this tenant.")
@click.option("--replica", metavar="NAME", help="Only requests to this replica.")
@admin_options
def tail(session: str | None, tenant: str | None, replica: str | None, admin: Admin) -> None:
    """Follow requests: a line for each that ends.

    The last 20 requests are shown first. One that waits for 15 s is named. The lines have
    columns, the last one with spaces. Ctrl-C ends it. --json prints the lines of the feed, which
    have every candidate's costs.
    """
    names, num_routers, said = Bounded[str, str](_MAX_NAMES), 1, set[str]()
    has_heading = admin.as_json
    try:
        for line in watched(admin):
            if not has_heading:
                click.secho(_joined([column.title for column in COLUMNS]), bold=True)
                has_heading = True
            match line["kind"]:
                case "decision" if is_wanted(line, session, tenant, replica):
                    if admin.as_json:
                        echo_json(line, indent=None)
                    else:
                        click.echo(text_of(line, names))
                case "state":
                    for each in titles(line).items():
                        names.put(*each)
                    for waits in long_waits(line, said):
                        if is_wanted(waits, session, tenant, replica):
                            _say(waiting(waits))
                    if num_routers != (num_routers := routers(line)):
                        others = "; the others' requests are not shown" if num_routers > 1 else ""
                        _say(f"one of {num(num_routers, 'router')}{others}")
                case "lost":
                    _say(f"{line['decisions']:,} requests are left out: too many a second")
                case "gone":
                    _say(f"the router is gone, trying again: {line['why']}")
    except KeyboardInterrupt:
        return


def watched(admin: Admin) -> Iterator[dict[str, Any]]:
    """Yield the lines of the feed, for good. A router that goes away is tried again.

    One line of ours says so: `{"kind": "gone", "why": …}`.

    Raises:
        NoRouter, Refused: it was not there at first, or does not let us in.
    """
    path, is_there = "live?per_s=500&last=20", True
    while True:
        try:
            for line in admin.lines(path):
                path, is_there = "live?per_s=500", True
                yield line
            why = "the router ended the stream"
        except (NoRouter, Refused) as exc:
            if "last" in path or (isinstance(exc, Refused) and exc.status < 500):
                raise
            why = exc.message
        if is_there:
            yield {"kind": "gone", "why": why}
        is_there = False
        time.sleep(PAUSE_S)


def long_waits(state: Mapping[str, Any], said: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the requests that have waited for long, and add them to those of which that is said."""
    long = {each["request"]: each for each in state["queue"]["shown"] if each["waited_s"] >= LONG_S}
    said.intersection_update(long)
    for request in long.keys() - said:
        said.add(request)
        yield long[request] | {"replica": ""}


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


def text_of(line: dict[str, Any], names: Mapping[str, str]) -> str:
    """Write a request of the feed as a coloured line."""
    num_again, is_well = sum(again(line["causes"]).values()), line["outcome"] == "ok"
    is_costly = num_again > 0.2 * line["tokens"]
    colour = "red" if is_costly or not is_well else "yellow" if num_again else None
    (row,) = cells(COLUMNS, [line | {"name": session_name(line["session"], names)}])
    return click.style(_joined(row), fg=colour)


def _joined(row: Sequence[Cell]) -> str:
    return " ".join(
        f"{cell:{'>' if column.is_right else '<'}{width}}"
        for cell, column, width in zip(row, COLUMNS, _WIDTHS, strict=True)
    ).rstrip()


def _say(text: str) -> None:
    click.secho(text, fg="yellow", err=True)
