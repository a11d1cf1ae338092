"""`warmroute explain`: where a request would go, as a table."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from router.cli.admin import Admin, admin_options, echo_json
from router.cli.terminal import drawing, drawn


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option(
    "--tenant",
    metavar="NAME",
    help="Explain it as a request of this tenant.",
)
@click.option(
    "--api",
    type=click.Choice(["chat", "completions", "messages", "responses"]),
    help="The API of the request.  [default: by its fields]",
)
@admin_options
def explain(file: Any, tenant: str | None, api: str | None, admin: Admin) -> None:
    """Show where a request would go, and why.

    FILE is the JSON body of the request; - reads it from stdin.
    """
    given = {name: value for name, value in (("tenant", tenant), ("api", api)) if value is not None}
    fields = admin.ask("POST", f"explain?{urlencode(given)}" if given else "explain", file.read())
    echo_json(fields) if admin.as_json else click.echo(table(fields).rstrip("\n"))


def table(explained: dict[str, Any]) -> str:
    """Draw every candidate's costs, the chosen one marked."""
    from rich.table import Table  # late: `--help` should not wait for it

    decision = explained["decision"]
    console = drawing()
    console.print(
        f"{explained['num_tokens']:,} prompt tokens ({explained['way']}), model "
        f"{explained['model']}, policy {explained['policy']}"
    )
    costs = {cost["id"]: cost for cost in decision["costs"]}
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "state"):
        grid.add_column(name)
    pooled = [_pooled(candidate) for candidate in explained["candidates"]]
    has_pool = any(text != "-" for text in pooled)
    has_disk = any(each["view"]["num_disk_tokens"] for each in explained["candidates"])
    for name in (
        "gpu tokens",
        *(("pool tokens",) if has_pool else ()),
        *(("on SSD",) if has_disk else ()),
        "in flight",
        "queue ms",
        "fetch ms",
        "prefill ms",
        "others ms",
        "total ms",
    ):
        grid.add_column(name, justify="right")
    for candidate, in_pool in zip(explained["candidates"], pooled, strict=True):
        view = candidate["view"]
        cost = costs.get(view["id"])
        chosen = view["id"] == decision["candidate"]
        numbers = (
            [f"{cost[k]:,.1f}" for k in ("fetch_ms", "prefill_ms", "others_ms", "total_ms")]
            if cost is not None
            else ["-"] * 4
        )
        grid.add_row(
            ("→ " if chosen else "  ") + view["id"],
            candidate["state"],
            f"{view['num_gpu_tokens']:,}",
            *((in_pool,) if has_pool else ()),
            *((f"{view['num_disk_tokens']:,}",) if has_disk else ()),
            str(view["num_requests"]),
            f"{view['queue_ms']:,.1f}",
            *numbers,
            style="bold green" if chosen else "",
        )
    console.print(grid)
    console.print(f"{decision['candidate']}: {decision['reason']}")
    if explained.get("prefill") is not None:
        console.print(_prefilled(explained["prefill"]))
    if "queue" in explained:
        console.print(_queued(explained["queue"]))
    return drawn(console)


def _pooled(candidate: dict[str, Any]) -> str:
    """Return what the candidate's pool has, and which of several pools that is."""
    number = candidate["view"]["num_pool_tokens"]
    return "-" if number is None else f"{number:,} {candidate.get('pool') or ''}".rstrip()


def _prefilled(prefill: dict[str, Any]) -> str:
    """Describe where the prompt would be computed, and why."""
    costs = f"{prefill['here_ms']:,.1f} ms to compute, {prefill['there_ms']:,.1f} ms to read"
    if prefill["where"] is None:
        return f"prefill: where it is decoded ({prefill['why'].replace('_', ' ')}); {costs}"
    return f"prefill: {prefill['where']}: {prefill['decision']['reason']}; {costs}"


def _queued(queue: dict[str, Any]) -> str:
    """Describe whether the request would wait, and why."""
    others = f"{queue['num_waiting']:,} waiting"
    has_deadline = queue.get("deadline_ms") is not None
    if has_deadline or queue["why"] == "window":  # how long room takes is not predicted
        others += f"; first token expected in {queue['expected_ttft_ms']:,.0f} ms"
    if has_deadline:
        others += f", wanted in {queue['deadline_ms']:,.0f} ms"
    if queue.get("tbt_limit_ms") is not None and queue["expected_tbt_ms"] is not None:
        others += (
            f"; tokens expected {queue['expected_tbt_ms']:,.1f} ms apart, "
            f"limit {queue['tbt_limit_ms']:,.1f} ms"
        )
    name = f"{queue['class']}, " if queue.get("class") is not None else ""
    if queue["goes_at_once"]:
        return f"queue: {name}would go at once ({queue['why'].replace('_', ' ')}); {others}"
    what = {
        "window": "the window to open",
        "tbt": "answers to end",
        "room": "room in the cache",
    }[queue["why"]]
    if queue["why"] == "room" and queue.get("capacity_tokens") is not None:
        what += (
            f" of {queue['where']} (tokens: {queue['capacity_tokens']:,}; conversations alive "
            f"there: {queue['num_sessions']:,}, which take {queue['num_session_tokens']:,})"
        )
    return f"queue: {name}would wait for {what}; {others}"
