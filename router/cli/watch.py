"""`warmroute tail`: requests as they end. `top` reads the same feed of the admin port."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import click

from router.api.sessions import engine_name, session_hash
from router.cli.admin import Admin, NoRouter, Refused, admin_options, echo_json
from router.cli.figures import again, clock, duration, listed
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


@click.command()
@click.option(
    "--session", metavar="SESSION", help="Only this session: its name here, or the client's id."
)
@click.option("--tenant", metavar="NAME", help="Only requests of this tenant.")
@click.option("--replica", metavar="NAME", help="Only requests to this replica.")
@admin_options
def tail(session: str | None, tenant: str | None, replica: str | None, admin: Admin) -> None:
    """Follow requests: a line for each that ends.

    Each line has the time, session, replica, prompt tokens, the cached share (~ if only predicted),
    time to first token, time in the queue, outcome, and why tokens were computed again. Ctrl-C ends
    it. --json prints the lines of the feed, which have every candidate's costs.
    """
    lost = 0
    try:
        for line in watched(admin, _MOST):
            match line["kind"]:
                case "decision":
                    if not is_wanted(line, session, tenant, replica):
                        continue
                    echo_json(line, indent=None) if admin.as_json else click.echo(
                        request_line(line)
                    )
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


def request_line(line: dict[str, Any]) -> str:
    """Write a request of the feed as a coloured line."""
    tokens, reported = line["tokens"], line["reported"]
    cached = line["cached"] if reported is None else reported
    share = cached / tokens if tokens else 0.0
    causes = again(line["causes"])
    colour = "red" if sum(causes.values()) > 0.2 * tokens else "yellow" if causes else "green"
    mark = "~" if reported is None else ""
    parts = [
        clock(line["at"]),
        click.style(f"{line['session'] or '-':16}", fg="cyan"),
        f"{line['replica']:8}",
        f"{tokens:>9,} tokens",
        click.style(f"{f'{mark}{share:.0%}':>5} cached", fg=colour),
        f"first token {duration(line['ttft_ms']):>7}",
        f"queue {duration(line['waited_ms']):>7}",
        click.style(f"{line['outcome']:4}", fg=None if line["outcome"] == "ok" else "red"),
    ]
    if causes:
        parts.append(click.style(listed(causes), fg=colour))
    if line["tenant"] is not None:
        parts.append(click.style(one_line(line["tenant"]), dim=True))
    return "  ".join(parts).rstrip()


def _say(text: str) -> None:
    click.secho(text, fg="yellow", err=True)
