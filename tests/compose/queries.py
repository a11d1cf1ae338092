"""The queries of the dashboard, and how to ask them.

Grafana itself is not here: what it would ask, with its variables filled in, is asked instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
from msgspec import Struct

from tests.compose.stacks import DOCKER

DASHBOARD = DOCKER / "grafana" / "dashboards" / "warmroute.json"
VARIABLES = {"$__range": "5m", "$__rate_interval": "1m", "$router": ".*"}


class Asked(Struct, frozen=True, kw_only=True):
    """One query of the dashboard, and what it returned. `values`: numbers, NaN left out."""

    row: str
    panel: str
    legend: str
    expr: str
    values: tuple[float, ...] = ()


def dashboard() -> dict[str, Any]:
    """Read the dashboard as Grafana gets it."""
    read: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return read


def queries() -> Iterator[Asked]:
    """List the dashboard's queries, top to bottom."""
    row = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()):
            yield Asked(
                row=row,
                panel=panel["title"],
                legend=target["legendFormat"],
                expr=target["expr"],
            )


def filled(expr: str) -> str:
    """Put values in the place of Grafana's variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def ask(prometheus: str, expr: str) -> tuple[float, ...]:
    """Run an instant query; return its samples."""
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expr}, trust_env=False)
    found = answer.json()
    assert found["status"] == "success", f"{expr}: {found.get('error')}"
    result = found["data"]["result"]
    pairs = [result] if found["data"]["resultType"] == "scalar" else [r["value"] for r in result]
    numbers = (float(value) for _, value in pairs)
    return tuple(number for number in numbers if not math.isnan(number))


def ask_all(prometheus: str) -> list[Asked]:
    """Run all of them."""
    return [
        Asked(row=q.row, panel=q.panel, legend=q.legend, expr=q.expr, values=values)
        for q in queries()
        for values in (ask(prometheus, filled(q.expr)),)
    ]
