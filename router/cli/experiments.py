"""The answer of GET /admin/experiments as tables for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def table(experiments: list[dict[str, Any]]) -> str:
    """Draw each experiment: what it is, how it stands, a row for each arm."""
    out = StringIO()
    console = Console(file=out, width=110, highlight=False)
    if not experiments:
        console.print("no experiments; start one: warmroute experiments start FILE")
    for experiment in experiments:
        console.print(escape(_head(experiment)), style="bold")
        for line in _lines(experiment):
            console.print("  " + escape(line))
        grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("  arm", "policy", "share", "guardrails"):
            grid.add_column(name)
        for arm in experiment["arms"]:
            grid.add_row(*map(escape, _row(arm)))
        console.print(grid)
    return out.getvalue()


def _head(experiment: dict[str, Any]) -> str:
    definition = experiment["definition"]
    models = ", ".join(definition["models"]) or "all models"
    return f"{experiment['name']}: {experiment['standing']}, {definition['design']}, {models}"


def _lines(experiment: dict[str, Any]) -> Iterator[str]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(experiment["started_at"]))
    yield f"since {began}"
    if experiment["ended"] is not None:
        yield f"ended: {experiment['ended']['reason']}"
    if experiment["overruled_by"] is not None:
        yield f"waits: {experiment['overruled_by']!r} claimed this traffic first"
    slot = experiment["slot"]
    if slot is not None:
        left_s = max(0.0, slot["ends_at"] - time.time())
        yield f"slot {slot['number']}: {slot['arm'] or 'no arm'}, {left_s:.0f} s left"


def _row(arm: dict[str, Any]) -> tuple[str, ...]:
    params = "".join(f":{name}={value}" for name, value in arm["params"].items())
    control = " (control)" if arm["is_control"] else ""
    share = f"{arm['share']:.1%}" if arm["stopped"] is None else "stopped"
    return f"  {arm['name']}{control}", arm["policy"] + params, share, _guardrails(arm)


def _guardrails(arm: dict[str, Any]) -> str:
    """Say how far each is from stopping its arm, or what has stopped it."""
    if arm["stopped"] is not None:
        return str(arm["stopped"]["reason"])
    told = [
        f"{each['guardrail']} {max(0.0, each['log_wealth'] / each['needed']):.0%} "
        f"of {each['num_samples']:,}"
        for each in arm["guardrails"]
    ]
    return ", ".join(told) or "none"
