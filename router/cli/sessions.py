"""`warmroute why` and `timeline`: what sessions cost, and why their tokens were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from router.cli.admin import Admin, Refused, admin_options, echo_json
from router.cli.figures import again, clock, listed, num, share
from router.cli.terminal import drawing, drawn, grid, one_line

_tenant = click.option("--tenant", metavar="NAME", help="Only sessions of this tenant.")


@click.command()
@click.argument("name", metavar="[SESSION|REQUEST]", required=False)
@_tenant
@click.option(
    "--limit",
    type=click.IntRange(1, 20_000),
    default=15,
    show_default=True,
    metavar="NUMBER",
    help="Sessions to list.",
)
@admin_options
def why(name: str | None, tenant: str | None, limit: int, admin: Admin) -> None:
    """Show why prompt tokens were computed again.

    SESSION is the name of a session here (16 hex digits), or the client's own session id. REQUEST
    is the id of a request. Without an argument: the sessions that cost most, and what to change.
    """
    if name is None:
        query = {"order": "cost", "limit": str(limit)} | ({"tenant": tenant} if tenant else {})
        fields = admin.ask("GET", f"sessions?{urlencode(query)}")
        found = admin.ask("GET", "findings")["findings"]
        fields["findings"] = [each for each in found if tenant in (None, each["tenant"])]
        echo_json(fields) if admin.as_json else click.echo(_overview(fields).rstrip("\n"))
        return
    fields = _session(admin, name, tenant)
    echo_json(fields) if admin.as_json else click.echo(_report(fields, name).rstrip("\n"))


@click.command()
@click.argument("name", metavar="SESSION")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="File to write; - is stdout.  [default: warmroute-SESSION.json]",
)
@_tenant
@admin_options
def timeline(name: str, output: Path | None, tenant: str | None, admin: Admin) -> None:
    """Write a session's timeline as a Perfetto trace.

    The trace shows the session's turns at each replica: queue, prefill, decode, pool reads and
    moves. Open the file at https://ui.perfetto.dev. SESSION is as for `warmroute why`.
    """
    fields = _session(admin, name, tenant, "/timeline")
    text, about = json.dumps(fields), fields["otherData"]
    if str(output) == "-" or (admin.as_json and output is None):
        click.echo(text)
        return
    file = output or Path(f"warmroute-{about['session']}.json")
    try:
        file.write_text(text + "\n")
    except OSError as exc:
        raise click.ClickException(f"{file}: {exc.strerror}") from exc
    left_out = f" ({about['turns_left_out']:,} older turns are left out)"
    click.echo(
        f"{file}: open it at https://ui.perfetto.dev{left_out if about['turns_left_out'] else ''}"
    )


def _session(admin: Admin, name: str, tenant: str | None, page: str = "") -> Any:
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    try:
        return admin.ask("GET", f"sessions/{quote(name, safe='')}{page}{query}")
    except Refused as refused:
        if refused.status != 404:
            raise
        what = f"no session or request {one_line(name)[:64]!r} is known"
        raise Refused(f"{what}; `warmroute why` lists sessions", refused.status) from refused


def _overview(fields: dict[str, Any]) -> str:
    """Draw the sessions that cost most, then the findings."""
    console = drawing()
    sessions = fields["sessions"]
    if not sessions:
        console.print("no sessions yet: they are listed after their first answer")
        return drawn(console)
    has_tenants = any(each["tenant"] for each in sessions)
    table = grid(
        *("session", *(("tenant",) if has_tenants else ()), "home"),
        right=("turns", "prompt", "cached", "again", "waited s", "engine s"),
        last="mostly",
    )
    for each in sessions:
        causes = again(each["causes"])
        table.add_row(
            each["session"],
            *((one_line(each["tenant"] or "-"),) if has_tenants else ()),
            each["home"],
            f"{each['turns']:,}",
            f"{each['prompt_tokens']:,}",
            share(_cached(each), each["prompt_tokens"]),
            f"{sum(causes.values()):,}",
            f"{each['waited_s']:,.1f}",
            f"{each['engine_s']:,.1f}",
            next(iter(causes), ""),
        )
    console.print(f"The {len(sessions):,} sessions that cost most, of {fields['total']:,}")
    console.print(table)
    for found in fields["findings"]:
        if found["session"] is None:  # it is about all of them
            console.print(f"\n! {found['text']}", markup=False, style="yellow")
            continue
        several = f"{found['num_sessions']:,} sessions, the last one "
        where = f"{several if found['num_sessions'] > 1 else 'session '}{found['session']}"
        console.print(f"\n! {where}: {found['text']}", markup=False, style="yellow")
    console.print("\nwarmroute why SESSION shows the turns of one", style="dim")
    return drawn(console)


def _report(fields: dict[str, Any], name: str) -> str:
    """Draw a session: its figures, a line a turn, and why tokens were computed."""
    console = drawing()
    for line in _head(fields):
        console.print(line, markup=False)
    turns = fields["turns_shown"]
    asked = [each for each in turns if each["request_id"] == name]
    left_out = fields["turns"] - len(turns)
    if left_out > 0:
        console.print(f"(the last {len(turns):,} of {fields['turns']:,} turns)")
    table = grid("time", "replica", right=("prompt", "cached", "new", "again"), last="why")
    for turn in asked or turns:
        table.add_row(*_turn_row(turn))
    console.print()
    console.print(table)
    console.print()
    said = _said_of(asked[0]) if asked else [(r["text"], r["advice"]) for r in fields["reasons"]]
    if not said:
        console.print("Nothing was computed again but the rest of a block.", style="green")
    for text, advice in said:
        console.print(f"• {text}", markup=False)
        if advice:
            console.print(f"  → {advice}", markup=False, style="cyan")
    return drawn(console)


def _head(fields: dict[str, Any]) -> list[str]:
    sources = fields["sources"]
    of_tenant = f", tenant {one_line(fields['tenant'])}" if fields["tenant"] else ""
    state = " (ended)" if fields["ended"] else ""
    lines = [
        f"session {fields['session']}{of_tenant}{state}: {num(fields['turns'], 'turn')} since "
        f"{clock(fields['begun'])}, model {one_line(fields['model'])}, home {fields['home']}",
        f"prompt tokens: {fields['prompt_tokens']:,}, "
        f"{share(_cached(fields), fields['prompt_tokens'])} cached "
        f"(GPU {sources['gpu']:,}, CPU {sources['cpu']:,}, pool {sources['pool']:,}), "
        f"computed {sources['computed']:,}",
        f"engine seconds: {fields['engine_s']:,.1f} used, {fields['saved_s']:,.1f} saved; "
        f"waited {fields['waited_s']:,.1f} s; {num(fields['moves'], 'move')}",
    ]
    if fields["parent"]:
        lines.append(f"started by session {fields['parent']}")
    lines += [
        f"started session {child['session']}: {num(child['turns'], 'turn')}, "
        f"{child['engine_s']:,.1f} engine seconds"
        for child in fields["children"]
    ]
    return lines


def _turn_row(turn: dict[str, Any]) -> tuple[str, ...]:
    computed = turn["computed"]
    cached = "?" if turn["num_cached"] is None else f"{turn['num_cached']:,}"
    tokens = computed["tokens"] if computed is not None else {}
    causes = again(tokens)
    why = listed(causes)
    change = computed.get("change") if computed is not None else None
    if "changed" in causes and change is not None:
        why = why.replace("changed", f"changed ({change['part']})")
    return (
        clock(turn["at"]),
        turn["candidate"],
        f"{turn['num_tokens']:,}",
        cached,
        f"{sum(tokens.values()) - sum(causes.values()):,}" if computed is not None else "?",
        f"{sum(causes.values()):,}" if computed is not None else "?",
        why if computed is not None else "its engine does not report cached tokens",
    )


def _said_of(turn: dict[str, Any]) -> list[tuple[str, str]]:
    """Pair a turn's lines with advice: the advice follows all of them."""
    lines = [(text, "") for text in turn["text"]]
    return [*lines[:-1], *((lines[-1][0], each) for each in [" ".join(turn["advice"])] if lines)]


def _cached(fields: dict[str, Any]) -> int:
    sources = fields["sources"]
    return int(sources["gpu"] + sources["cpu"] + sources["pool"])
