"""The answer of GET /admin/replicas as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def table(listed: dict[str, Any]) -> str:
    """Draw one row per candidate; a replica that is not found yet has one that says why."""
    out = StringIO()
    console = Console(file=out, width=110, highlight=False)
    if not listed["replicas"]:
        console.print("no replicas; add one: warmroute replicas add http://HOST:PORT")
        return out.getvalue()
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "address", "used", "cache"):
        grid.add_column(name)
    for name in ("in flight", "queue ms", "blocks"):
        grid.add_column(name, justify="right")
    for replica in listed["replicas"]:
        for row in _rows(replica):
            grid.add_row(*map(escape, row))
    console.print(grid)
    return out.getvalue()


def _rows(replica: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    url = replica["url"]
    if "waiting_for" in replica:
        waiting = replica["waiting_for"].removeprefix(url).strip()
        yield replica["name"], url, _used(replica, f"not yet: {waiting}"), "-", "-", "-", "-"
        return
    for rank in replica["ranks"]:
        status = rank["status"]
        reason = f": {rank['reason']}" if rank["reason"] else ""
        yield (
            status["id"],
            url,
            _used(replica, "yes" if status["state"] == "up" else f"no: {status['reason']}"),
            f"{rank['cache']}{reason}",
            str(status["num_requests"]),
            f"{status['queue_ms']:,.0f}",
            f"{rank['num_gpu_blocks']:,}",
        )


def _used(replica: dict[str, Any], otherwise: str) -> str:
    if replica["leaving"]:
        return "no: leaving"
    return "no: draining" if replica["draining"] else otherwise
