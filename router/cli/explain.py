"""The answer of /admin/explain as a table for people."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table


def table(explained: dict[str, Any]) -> str:
    """Draw every candidate's costs, the chosen one first named."""
    decision = explained["decision"]
    out = StringIO()
    console = Console(file=out, width=110, highlight=False)
    console.print(
        f"{explained['num_tokens']:,} prompt tokens ({explained['way']}), model "
        f"{explained['model']}, policy {explained['policy']}"
    )
    if explained.get("num_pool_tokens") is not None:
        console.print(f"{explained['num_pool_tokens']:,} leading tokens in the shared pool")
    costs = {cost["id"]: cost for cost in decision["costs"]}
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "state"):
        grid.add_column(name)
    for name in (
        "gpu tokens",
        "in flight",
        "queue ms",
        "fetch ms",
        "prefill ms",
        "others ms",
        "total ms",
    ):
        grid.add_column(name, justify="right")
    for candidate in explained["candidates"]:
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
            str(view["num_requests"]),
            f"{view['queue_ms']:,.1f}",
            *numbers,
            style="bold" if chosen else "",
        )
    console.print(grid)
    console.print(f"{decision['candidate']}: {decision['reason']}")
    return out.getvalue()
