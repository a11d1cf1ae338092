"""`warmroute why`: what sessions cost, and why their tokens were computed."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, urlencode

import click

from router.cli.admin import Admin, Refused, admin_options, echo_json
from router.cli.terminal import (
    Column,
    again,
    cell_of_duration,
    cell_of_name,
    cells,
    clock,
    drawing,
    drawn,
    explained,
    fitted,
    grid,
    listed,
    money,
    num,
    one_line,
    session_name,
    share,
    waited,
    waiting,
)

# fmt: off
SPENDING: Final = (
    Column("prompt-s", "GPU seconds of prompts",
        lambda s: f"{s['engine_s']:,.1f}", 2, is_right=True),
    Column("answer-s", "GPU seconds of answers: their share of decoding",
        lambda s: f"{s['decode_s']:,.1f}", 3, is_right=True),
    Column("saved-s", "GPU seconds that caches saved",
        lambda s: f"{s['saved_s']:,.1f}", 1, is_right=True),
    Column("cost", "of all GPU seconds, if replicas have a cost_per_hour",
        lambda s: money(s["cost"]), 4, is_right=True),
    Column("saved", "cost that caches saved", lambda s: money(s["cost_saved"]), 5, is_right=True),
)
COLUMNS: Final = (
    Column("session", "its name here, or its client's id if session.show_ids is on",
        lambda s: session_name(s["title"] or s["session"], {})),
    Column("tenant", "whose it is", lambda s: cell_of_name(one_line(s["tenant"] or "")), 7),
    Column("home", "the replica of its last turn", lambda s: s["home"], 6),
    Column("turns", "answered requests", lambda s: f"{s['turns']:,}", is_right=True),
    Column("prompt", "tokens of all its prompts",
        lambda s: f"{s['prompt_tokens']:,}", is_right=True),
    Column("cached", "share of these that a cache had",
        lambda s: share(_cached(s), s["prompt_tokens"]), is_right=True),
    Column("again", "tokens that were computed again",
        lambda s: f"{sum(again(s['causes']).values()):,}", is_right=True),
    Column("waited-s", "seconds in the queue", lambda s: f"{s['waited_s']:,.1f}", 8, is_right=True),
    *SPENDING,
    Column("mostly", "the main cause of those computed again",
        lambda s: next(iter(again(s["causes"])), ""), 9),
)
SUM_COLUMNS: Final = (
    Column("name", "tenant or model", lambda s: cell_of_name(one_line(s["name"] or ""))),
    Column("turns", "answered requests of sessions", lambda s: f"{s['turns']:,}", is_right=True),
    Column("prompt", "tokens of prompts", lambda s: f"{s['prompt_tokens']:,}", is_right=True),
    Column("output", "tokens of answers", lambda s: f"{s['output_tokens']:,}", 9, is_right=True),
    Column("cached", "share of the prompts that a cache had",
        lambda s: share(_cached(s), s["prompt_tokens"]), 8, is_right=True),
    *SPENDING,
)
# fmt: on


@click.command(epilog=explained(sessions=COLUMNS))
@click.argument("name", metavar="[SESSION|REQUEST]", required=False)
@click.option(
    "--by",
    type=click.Choice(["session", "tenant", "model"]),
    default="session",
    show_default=True,
    help="List sessions, or what each tenant or model cost since the start.",
)
@click.option("--tenant", metavar="NAME", help="Only sessions of this tenant.")
@click.option(
    "--limit",
    type=click.IntRange(1, 20_000),
    default=15,
    show_default=True,
    metavar="NUMBER",
    help="Sessions to list.",
)
@admin_options
def why(name: str | None, by: str, tenant: str | None, limit: int, admin: Admin) -> None:
    """Show why prompt tokens were computed again.

    SESSION is the name of a session here (16 hex digits), or the client's own session id. REQUEST
    is the id of a request. Without an argument: the sessions that cost most, and what to change.

    It shows what they cost, too. GPU seconds are seconds of whole replicas. A prompt takes the time
    to compute its uncached tokens (by the learned cost model) and to read others. An answer takes
    an equal share of each second in which its replica decodes. Idle time is charged to none.
    `cost_per_hour` of a replica adds money.
    """
    if by != "session":
        if name is not None or tenant is not None:
            raise click.UsageError(f"--by {by} takes neither a session nor --tenant")
        fields = admin.ask("GET", f"sessions?by={by}")
        echo_json(fields) if admin.as_json else click.echo(_sums(fields).rstrip("\n"))
        return
    if name is None:
        query = {"order": "cost", "limit": str(limit)} | ({"tenant": tenant} if tenant else {})
        fields = admin.ask("GET", f"sessions?{urlencode(query)}")
        found = admin.ask("GET", "findings")["findings"]
        fields["findings"] = [each for each in found if tenant in (None, each["tenant"])]
        echo_json(fields) if admin.as_json else click.echo(_overview(fields).rstrip("\n"))
        return
    fields = _session(admin, name, tenant)
    echo_json(fields) if admin.as_json else click.echo(_report(fields, name).rstrip("\n"))


def _session(admin: Admin, name: str, tenant: str | None) -> Any:
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    try:
        return admin.ask("GET", f"sessions/{quote(name, safe='')}{query}")
    except Refused as refused:
        if refused.status != 404:
            raise
        what = f"no session or request {one_line(name)[:64]!r} is known"
        raise Refused(f"{what}; `warmroute why` lists sessions", refused.status) from refused


def _overview(fields: dict[str, Any]) -> str:
    """Draw the sessions that cost most, then the findings."""
    console, sessions = drawing(), fields["sessions"]
    if not sessions:
        console.print("no sessions yet: they are listed after their first answer")
        return drawn(console)
    console.print(f"Sessions that cost most: {len(sessions):,} of {fields['total']:,}")
    console.print(fitted(console, COLUMNS, cells(COLUMNS, sessions), drop_empty=True))
    for found in fields["findings"]:
        if found["session"] is None:  # it is about all of them
            console.print(f"\n! {found['text']}", style="yellow")
            continue
        several = f"{found['num_sessions']:,} sessions, the last one "
        where = f"{several if found['num_sessions'] > 1 else 'session '}{found['session']}"
        console.print(f"\n! {where}: {found['text']}", style="yellow")
    console.print("\nwarmroute why SESSION shows the turns of one", style="dim")
    return drawn(console)


def _sums(fields: dict[str, Any]) -> str:
    """Draw what each tenant or model cost since the start."""
    console, rows = drawing(), fields["rows"]
    if not rows:
        return "no turns yet: they are counted when their answers end"
    columns = (SUM_COLUMNS[0]._replace(title=fields["by"]), *SUM_COLUMNS[1:])
    console.print(fitted(console, columns, cells(columns, rows), drop_empty=True))
    return drawn(console)


def _report(fields: dict[str, Any], name: str) -> str:
    """Draw a session: its figures, a line a turn, and why tokens were computed."""
    console = drawing()
    for each in fields["waits"]:
        console.print(waiting(each), style="yellow")
    if "turns" not in fields:  # its first one waits
        return drawn(console)
    for line in _head(fields):
        console.print(line)
    turns = fields["turns_shown"]
    asked = [each for each in turns if each["request_id"] == name]
    left_out = fields["turns"] - len(turns)
    if left_out > 0:
        console.print(f"(the last {len(turns):,} of {fields['turns']:,} turns)")
    table = grid(
        "time", "replica", right=("waited", "prompt", "cached", "new", "again"), last="why"
    )
    for turn in asked or turns:
        table.add_row(*_turn_row(turn))
    console.print()
    console.print(table)
    console.print()
    said = _said_of(asked[0]) if asked else [(r["text"], r["advice"]) for r in fields["reasons"]]
    if not said:
        console.print("Nothing was computed again but the rest of a block.", style="green")
    for text, advice in said:
        console.print(f"• {text}")
        if advice:
            console.print(f"  → {advice}", style="cyan")
    return drawn(console)


def _head(fields: dict[str, Any]) -> list[str]:
    sources = fields["sources"]
    title = f" ({one_line(fields['title'])})" if fields["title"] else ""
    of_tenant = f", tenant {one_line(fields['tenant'])}" if fields["tenant"] else ""
    state = " (ended)" if fields["ended"] else ""
    lines = [
        f"session {fields['session']}{title}{of_tenant}{state}: {num(fields['turns'], 'turn')} "
        f"since {clock(fields['begun'])}, model {one_line(fields['model'])}, home {fields['home']}",
        f"prompt tokens: {fields['prompt_tokens']:,}, "
        f"{share(_cached(fields), fields['prompt_tokens'])} cached "
        f"(GPU {sources['gpu']:,}, CPU {sources['cpu']:,}, pool {sources['pool']:,}), "
        f"computed {sources['computed']:,}",
        f"GPU seconds: {fields['gpu_s']:,.1f} used (prompts {fields['engine_s']:,.1f}, answers "
        f"{fields['decode_s']:,.1f}), {fields['saved_s']:,.1f} saved{_costs(fields)}",
        f"waited {fields['waited_s']:,.1f} s; {num(fields['moves'], 'move')}",
    ]
    if fields["parent"]:
        lines.append(f"started by session {fields['parent']}")
    lines += [
        f"started session {child['session']}: {num(child['turns'], 'turn')}, "
        f"{child['gpu_s']:,.1f} GPU seconds"
        for child in fields["children"]
    ]
    return lines


def _costs(fields: dict[str, Any]) -> str:
    if fields["cost"] is None:
        return ""
    return f"; cost {money(fields['cost'])}, saved {money(fields['cost_saved'])}"


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
        f"{cell_of_duration(turn['waited_ms'])} {waited(turn).removeprefix('waited ')}".rstrip(),
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
