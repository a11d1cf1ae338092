"""`warmroute replicas` and `engine`: the replicas of a running router, and orders to engines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, get_args
from urllib.parse import quote

import click

from router.base.engines import Role, Transfer
from router.cli.admin import Admin, admin_options, echo_json
from router.cli.terminal import drawing, drawn, num

_POLL_S: Final = 1.0
_QUESTIONS: Final = ("is_sleeping", "is_paused")
"""Routes of engines that only tell something."""
_COLOURS: Final = {
    "yes": "green",
    "not yet": "yellow",
    "no": "red",
    "exact": "green",
    "degraded": "yellow",
    "blind": "red",
}


@click.group()
def replicas() -> None:
    """List, add, drain and remove replicas.

    An order holds for all routers that share the Redis of the one that is asked.
    """


@replicas.command("list")
@admin_options
def list_replicas(admin: Admin) -> None:
    """Show every replica and its state.

    The table shows whether the replica is used, its requests in flight, and how well the router
    knows its cache.
    """
    fields = admin.ask("GET", "replicas")
    echo_json(fields) if admin.as_json else click.echo(table(fields).rstrip("\n"))


@replicas.command("add")
@click.argument("url")
@click.option("--name", help="Name in metrics and headers.  [default: the next free r1, r2, …]")
@click.option(
    "--events",
    multiple=True,
    metavar="tcp://HOST:PORT",
    help="KV event endpoint, one per data-parallel rank; repeatable.",
)
@click.option(
    "--replay",
    multiple=True,
    metavar="tcp://HOST:PORT",
    help="Replay endpoint, one per data-parallel rank; repeatable.",
)
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    help="What it computes: prompts, answers or both.  [default: both]",
)
@click.option(
    "--transfer",
    type=click.Choice(get_args(Transfer)),
    help="How KV gets from prefill to decode replicas.",
)
@click.option(
    "--bootstrap",
    metavar="URL",
    help="Bootstrap server of a prefill replica with transfer mooncake.",
)
@admin_options
def add_replica(url: str, admin: Admin, **options: Any) -> None:
    """Add the vLLM server at URL."""
    order = {"url": url, **options}
    given = {key: value for key, value in order.items() if value}
    fields = admin.ask("POST", "replicas", given)
    is_new = "added; `warmroute replicas` shows whether it answers"
    state = is_new if fields["is_new"] else "is there already"
    click.echo(
        json.dumps(fields) if admin.as_json else f"{fields['name']}: {fields['url']} {state}"
    )


@replicas.command("drain")
@click.argument("name")
@click.option(
    "--evacuate", is_flag=True, help="Let live sessions end there first, and wait for that."
)
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(1.0, 86_400.0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long sessions may stay with --evacuate.",
)
@admin_options
def drain_replica(name: str, evacuate: bool, within_s: float, admin: Admin) -> None:
    """Send NAME no new requests.

    With --evacuate, sessions that live there stay until they end. A session moves at once if its
    prompt is also elsewhere, and in the last quarter of the time the others move. Ctrl-C ends the
    waiting only.

    Exit status with --evacuate: 0 no live session is left there, 1 the time is over.
    """
    if not evacuate:
        _drain(name, True, admin)
        return
    order = {"draining": True, "evacuate": True, "within_s": within_s}
    admin.ask("POST", _path(name, "/drain"), order)
    left = _evacuated(name, admin)
    if admin.as_json:
        echo_json(left)
    elif left["sessions"]:
        click.echo(f"{name}: the time is over, with {_left(left)}; it can be stopped")
    else:
        click.echo(f"{name} has no live sessions; it can be stopped")
    sys.exit(1 if left["sessions"] else 0)


def _evacuated(name: str, admin: Admin) -> dict[str, Any]:
    """Wait until an evacuation is over, and say how far it is.

    Raises:
        ClickException: another order has ended it.
    """
    said = None
    while True:
        listed = admin.ask("GET", "replicas")["replicas"]
        left: dict[str, Any] | None = next(
            (each.get("evacuation") for each in listed if each["name"] == name), None
        )
        if left is None:
            raise click.ClickException(f"another order has ended the evacuation of {name}")
        if left["is_over"]:
            return left
        if said != (said := _left(left)):
            click.echo(f"{name}: {said}, {left['left_s']:,.0f} s left", err=True)
        time.sleep(_POLL_S)


def _left(left: dict[str, Any]) -> str:
    """Describe what is left at a replica."""
    return f"{num(left['sessions'], 'live session')}, {left['requests']:,} in flight"


@replicas.command("undrain")
@click.argument("name")
@admin_options
def undrain_replica(name: str, admin: Admin) -> None:
    """Send NAME requests again."""
    _drain(name, False, admin)


def _drain(name: str, draining: bool, admin: Admin) -> None:
    fields = admin.ask("POST", _path(name, "/drain"), {"draining": draining})
    text = "gets no new requests" if draining else "gets requests again"
    click.echo(json.dumps(fields) if admin.as_json else f"{name} {text}")


def _path(name: str, rest: str) -> str:
    return f"replicas/{quote(name, safe='')}{rest}"


@replicas.command("remove")
@click.argument("name")
@click.option("--now", is_flag=True, help="Do not wait for its answers in flight.")
@admin_options
def remove_replica(name: str, now: bool, admin: Admin) -> None:
    """Remove NAME when its answers in flight are done."""
    fields = admin.ask("DELETE", _path(name, "?now=1" if now else ""))
    text = "is removed" if now else "is removed as soon as its answers in flight are done"
    click.echo(json.dumps(fields) if admin.as_json else f"{name} {text}")


@click.command()
@click.argument("route")
@click.argument("params", nargs=-1, metavar="[PARAM=VALUE]...")
@click.option(
    "--replica", "names", multiple=True, metavar="NAME", help="Send it to this replica; repeatable."
)
@click.option("--all", "is_for_all", is_flag=True, help="Send it to every replica.")
@admin_options
def engine(
    route: str, params: tuple[str, ...], names: tuple[str, ...], is_for_all: bool, admin: Admin
) -> None:
    """Send an order to engines, such as sleep.

    For example: `warmroute engine sleep level=1 --replica r1`, `warmroute engine resume --all`.

    An order needs --replica or --all. ROUTE is an engine's route: reset_prefix_cache,
    reset_mm_cache, reset_encoder_cache, sleep, wake_up, is_sleeping, release_kv_cache_memory,
    pause, resume, is_paused, start_profile, stop_profile, load_lora_adapter, unload_lora_adapter,
    init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update. Most
    exist on engines with VLLM_SERVER_DEV_MODE=1 only.

    Careful: `sleep` (from level 1 on), `pause` and `reset_prefix_cache reset_external=true` at one
    replica empty the whole pool that it shares with others. One that sleeps or is paused is sent no
    requests. Those without a first byte move to another replica; others wait, or end (`pause
    mode=abort`, the default): drain it first.
    """
    if wrong := next((each for each in params if "=" not in each), None):
        raise click.UsageError(f"{wrong!r} is not PARAM=VALUE")
    if names and is_for_all:
        raise click.UsageError("give --replica or --all, not both")
    if not names and not is_for_all and route not in _QUESTIONS:
        raise click.UsageError(
            f"say where: {route} --replica NAME for one replica (repeatable), or {route} --all"
        )
    order = {"route": route, "params": dict(each.split("=", 1) for each in params)}
    given = order | {"replicas": list(names)} if names else order
    fields = admin.ask("POST", "control", given, timeout_s=90.0)
    if admin.as_json:
        echo_json(fields)
    for each in () if admin.as_json else fields["replicas"]:
        answer = json.dumps(each["answer"]) if each["answer"] is not None else ""
        click.echo(f"{each['name']}: {each['error'] or each['status']} {answer}".rstrip())
    if any(each["error"] for each in fields["replicas"]):
        sys.exit(1)


def table(listed: dict[str, Any]) -> str:
    """Draw one row per candidate; a replica that is not found yet has one that says why."""
    from rich.table import Table  # late: `--help` should not wait for it
    from rich.text import Text

    console = drawing()
    for source in listed.get("sources", ()):
        if source["reason"]:
            console.print(f"{source['name']} is not followed: {source['reason']}")
        for url, reason in source["not_followed"].items():
            console.print(f"{source['name']}: {url} is left out: {reason}")
    if not listed["replicas"]:
        console.print("no replicas; add one: warmroute replicas add http://HOST:PORT")
        return drawn(console)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "address", "used", "cache"):
        grid.add_column(name)
    for name in ("in flight", "queue ms", "blocks"):
        grid.add_column(name, justify="right")
    for replica in listed["replicas"]:
        for row in _rows(replica):
            grid.add_row(*(Text(cell, _colour(cell)) for cell in row))
    console.print(grid)
    return drawn(console)


def _colour(cell: str) -> str:
    """Choose the colour of a cell by its first word; "": none."""
    return _COLOURS.get(cell.partition(":")[0], "")


def _rows(replica: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    url = replica["url"]
    if "waiting_for" in replica:
        waiting = replica["waiting_for"].removeprefix(url).strip()
        state = "draining" if replica["draining"] else ""
        used = _unused(replica, state) or f"not yet: {waiting}"
        yield replica["name"], url, used, "-", "-", "-", "-"
        return
    for rank in replica["ranks"]:
        reason = rank["cache_reason"] or replica.get("warning") or ""
        reason = f": {reason}" if reason else ""
        yield (
            rank["id"],
            url,
            _unused(replica, rank["state"], rank["reason"]) or _use(replica),
            f"{rank['cache']}{reason}",
            str(rank["num_requests"]),
            f"{rank['queue_ms']:,.0f}",
            f"{rank['num_gpu_blocks']:,}",
        )


def _use(replica: dict[str, Any]) -> str:
    """Return what a replica that is up is used for: its role, unless it is both."""
    role = replica["replica"]["role"]
    return "yes" if role == "both" else f"yes: {role}"


def _unused(replica: dict[str, Any], state: str, reason: str = "") -> str:
    """Return why a replica is not used; "": it is, or is not found yet."""
    if replica["leaving"]:
        return "no: leaving"
    if not replica.get("ready", True):
        return f"no: not ready, says {replica['source']}"
    if state in ("", "up"):
        return ""
    if state == "draining" and (left := replica.get("evacuation")):
        return f"no: draining, {_left(left)}"
    from router.replicas.candidate_state import ON_PURPOSE  # late: `--help` should not wait for it

    return f"no: {state}" if state in ON_PURPOSE or not reason else f"no: {state}, {reason}"
