"""`warmroute status`: how a running router is, once; `warmroute page`: where its live page is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from router.cli.admin import Admin, admin_options, echo_json
from router.cli.terminal import (
    Cell,
    Column,
    again,
    age,
    bar,
    cell_of_duration,
    cells,
    drawing,
    drawn,
    explained,
    fitted,
    listed,
    num,
    one_line,
    share,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


State = dict[str, Any]

_MAX_SAID: Final = 10
_RECENT_S: Final = 600.0
_COLOURS: Final = {"up": "green", "exact": "green", "degraded": "yellow", "blind": "red"}


# fmt: off
REPLICA_COLUMNS: Final = (
    Column("replica", "its name", lambda r: r["id"]),
    Column("state", "up, or why it gets no requests", lambda r: _coloured(r["state"], "yellow")),
    Column("cache", "whether its contents are known: exact, degraded, blind",
        lambda r: _coloured("no-events" if r["awaits_events"] else r["cache"]), 1),
    Column("live", "cache that live sessions need; above 100% they evict each other",
        lambda r: (bar(r["live_fill"]), "red" if (r["live_fill"] or 0.0) > 1.0 else "")),
    Column("sessions", "live sessions", lambda r: f"{r['num_sessions']:,}", 6, is_right=True),
    Column("fill", "cache that is used, by older blocks, too",
        lambda r: share(r["cache_fill"] or 0.0, r["cache_fill"] is not None), 7, is_right=True),
    Column("running", "requests in flight", lambda r: f"{r['num_requests']:,}", 2, is_right=True),
    Column("work", "time until the prompts there are computed",
        lambda r: cell_of_duration(r["queue_ms"]), 3, is_right=True),
    Column("right", "predicted hits that the engine confirmed",
        lambda r: f"{r['right'] / r['audited']:.1%}" if r["audited"] else "-", 5, is_right=True),
)
# fmt: on


def _coloured(name: str, other: str = "") -> Cell:
    return name, _COLOURS.get(name, other)


@click.command(epilog=explained(replicas=REPLICA_COLUMNS))
@admin_options
def status(admin: Admin) -> None:
    """Show how a running router is.

    The replicas, whether their caches are known, the queue, which tokens were computed again and
    why, and prompts to change.

    Exit status: 0 nothing is broken, 1 something is degraded (the last lines say what), 2 no router
    answers, or one of another release.
    """
    try:
        state = admin.ask("GET", "state")
    except click.ClickException as exc:
        exc.show()
        sys.exit(2)
    try:
        text = "" if admin.as_json else report(state).rstrip("\n")
    except KeyError as exc:
        about = state.get("router", {}).get("version", "unknown")
        why = f"the router does not say {exc}: use `warmroute` of its release, {about}"
        click.ClickException(why).show()
        sys.exit(2)
    echo_json(state) if admin.as_json else click.echo(text)
    sys.exit(1 if state["degraded"] else 0)


def report(state: State) -> str:
    """Draw a state."""
    console, wrong = drawing(), state["degraded"]
    console.print(traffic_line(state), style="bold")
    console.print(headline(state, console.width))
    console.print()
    console.print(replica_table(state, console))
    console.print()
    for text in (queue_line(state), sessions_line(state), *experiment_line(state)):
        console.print(text)
    console.print(tokens_line(state))
    advice = (*overfull(state), *(each["text"] for each in state["findings"]))
    for text in advice:
        console.print(f"! {text}", style="yellow")
    console.print()
    if not wrong:
        said = "nothing is broken; the lines with ! say what to change" if advice else "all is well"
        console.print(said, style="green")
    for text in wrong[:_MAX_SAID]:
        console.print(f"✗ {one_line(text)}", style="red")
    if len(wrong) > _MAX_SAID:
        console.print(f"and {len(wrong) - _MAX_SAID:,} more", style="red")
    return drawn(console)


def traffic_line(state: State) -> str:
    """Return the line on the last minute: requests, failures, times to first token, waits."""
    recent = state["recent"]
    num_requests, failed = recent["requests"], recent["failed"]
    if not num_requests:
        text = "no request ended in the last minute"
    else:
        rate = num_requests / max(1, min(recent["window_s"], state["router"]["up_s"]))
        text = f"{rate:,.1f} requests/s, {share(failed, num_requests)} failed"
        if recent["ttft_p50_s"] is not None:
            text += (
                f", TTFT {recent['ttft_p50_s']:,.2f} s (P50), {recent['ttft_p99_s']:,.2f} s (P99)"
            )
    return f"{text}, longest wait {state['queue'].get('longest_s', 0.0):,.0f} s"


def headline(state: State, width: int) -> str:
    """Return the line that names the router, and what it knows and does in a few numbers.

    What does not change is left out if it is too long.
    """
    about, replicas = state["router"], state["replicas"]
    known = replicas["by_cache"].get("exact", 0)
    num_up = replicas["by_state"].get("up", 0)
    name = f"warmroute {about['version']}"
    if (num_routers := routers(state)) > 1:
        name += f", one of {num_routers:,} routers"
    numbers = (
        f"{num_up:,} of {num(replicas['total'], 'replica')} up, {num(known, 'cache')} known, "
        f"{replicas['requests']:,} in flight, {state['queue']['waiting']:,} waiting"
    )
    whole = f"{name}, {about['policy']}, up {age(about['up_s'])}: {numbers}"
    return whole if len(whole) <= width else f"{name}: {numbers}"


def routers(state: State) -> int:
    """Return how many routers share their state, the one that answered included."""
    sharing = state["sharing"]
    return sharing.get("routers", 1) if sharing is not None else 1


def experiment_line(state: State) -> Iterator[str]:
    """Yield a line on the experiment, if there is one: its variants, and the next one."""
    experiment = state.get("experiment")
    if experiment is None:
        return
    variants = ", ".join(
        f"{each['name']} {each['policy']} {each['share']:.0%}" for each in experiment["variants"]
    )
    is_running = experiment["standing"] == "running"
    text = f"experiment {experiment['name']} ({experiment['design']}): {variants}"
    text += f", {'since' if is_running else 'from'} {_moment(experiment['started_at'])}"
    slot, coming = experiment["slot"], experiment["next"]
    if slot is not None:
        text += f"; now {slot['variant'] or 'none'}, until {_moment(slot['ends_at'])}"
    if coming is not None:
        text += f"; then {coming['name']}, from {_moment(coming['starts_at'])}"
    yield text


def _moment(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def overfull(state: State) -> Iterator[str]:
    """Yield a line on replicas that have more live sessions than fit into their caches."""
    full = [
        f"{each['id']} ({each['live_fill']:.0%})"
        for each in state["replicas"]["shown"]
        if (each["live_fill"] or 0.0) > 1.0
    ]
    if full:
        names = ", ".join(full) if len(full) <= _MAX_SAID else f"{len(full):,} replicas"
        yield (
            f"live sessions need more than the KV cache of {names}: add replicas or KV cache, or "
            "run fewer agents at a time"
        )


def replica_table(state: State, console: Console) -> Table:
    """Draw a row for each of the first replicas; those in trouble are first if there are more."""
    replicas = state["replicas"]
    num_all = replicas["total"] + replicas["num_missing"]
    most = num_all if num_all <= _MAX_SAID + 1 else _MAX_SAID
    rows: list[list[Cell]] = [
        [each["name"], ("missing", "red"), *["-"] * (len(REPLICA_COLUMNS) - 2)]
        for each in replicas["missing"][:most]
    ]
    shown = replicas["shown"][: most - len(rows)]
    rows += cells(REPLICA_COLUMNS, shown)
    left = num_all - len(rows)
    if left > 0:
        rows.append([f"… {left:,} more", *[""] * (len(REPLICA_COLUMNS) - 1)])
    return fitted(console, REPLICA_COLUMNS, rows)


def queue_line(state: State) -> str:
    """Return the line on how many requests wait, and for what."""
    queue = state["queue"]
    if not queue["on"]:
        return "queue: off"
    if not queue["waiting"]:
        return "queue: nothing waits"
    causes = sorted(queue["for"].items(), key=lambda pair: -pair[1])
    longest = max((each["waited_s"] for each in queue["shown"]), default=0.0)
    whys = ", ".join(f"{n:,} for {why}" for why, n in causes)
    return f"queue: {queue['waiting']:,} waiting, {whys}; the longest for {longest:,.1f} s"


def sessions_line(state: State) -> str:
    """Return the line on the session that cost most."""
    sessions = state["sessions"]
    text = f"sessions: {sessions['total']:,} known"
    for most in sessions["shown"][:1]:
        text += (
            f"; {most['session']} cost most ({most['turns']:,} turns, "
            f"{most.get('gpu_s', most['engine_s']):,.1f} GPU seconds)"
        )
    return text


def tokens_line(state: State) -> Text:
    """Return which part of recent prompts was cached, new, and computed again, and why."""
    from rich.text import Text  # late, as in `drawing`

    columns, step_s = state["tokens"]["columns"], state["tokens"]["step_s"]
    steps = state["tokens"]["steps"][-max(1, round(_RECENT_S / step_s)) :]
    sums = [sum(column) for column in zip(*(step[1:] for step in steps), strict=True)]
    tokens = dict(zip(columns, sums or [0] * len(columns), strict=True))
    minutes = max(1, round(len(steps) * step_s / 60))
    what, total = f"tokens of the last {num(minutes, 'minute')}", sum(tokens.values())
    if not total:
        return Text(f"{what}: none")
    num_new, causes = tokens["new"] + tokens["last_block"], again(tokens)
    text = Text(
        f"{what}: {total:,}, {share(tokens['cached'], total)} cached, {share(num_new, total)} new"
    )
    if causes:
        part = share(sum(causes.values()), total)
        text.append(f", {part} computed again: {listed(causes)}", "yellow")
    return text


@click.command()
@admin_options
def page(admin: Admin) -> None:
    """Print a link to the live page.

    The page shows what the router does: caches, load, the queue, sessions, and why tokens were
    computed. On a terminal the link has your admin token, behind a #. A browser keeps that part to
    itself, and the page removes it from the address at once.
    """
    admin.ask("GET", "state")  # a link that does not work is none
    link = f"{admin.url.rstrip('/')}/"
    token = admin.token() if sys.stdout.isatty() else None
    if token is not None:
        link += f"#token={token}"
    echo_json({"url": link}) if admin.as_json else click.echo(link)
