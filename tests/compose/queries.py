"""Run every query of the dashboard against the Prometheus of the emulated stack.

    python -m tests.compose.queries      what each returned, as a table; status 1 if one is empty

Grafana itself is not here: what it would ask, with its variables filled in, is asked instead.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.compose.runner import Stack
from tests.compose.stacks import DOCKER, Session, client, emulated_stack, wait_until

DASHBOARD = DOCKER / "grafana" / "dashboards" / "warmroute.json"
VARIABLES = {"$__rate_interval": "1m", "$router": ".*"}
SCRAPES = 3  # of each target, before and after traffic of every kind

MODEL = "tiny"


class Asked(Struct, frozen=True, kw_only=True):
    """One query of the dashboard, and what it returned. `values`: numbers, NaN left out."""

    row: str
    panel: str
    legend: str
    expr: str
    values: tuple[float, ...] = ()

    @property
    def shown(self) -> str:
        """The numbers for people, the largest if they are many."""
        if not self.values:
            return "-"
        return f"{max(self.values):.4g}" if len(self.values) == 1 else f"≤ {max(self.values):.4g}"


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


def make_traffic(stack: Stack) -> None:
    """Cause what the dashboard shows: sessions at both replicas, and fetches from the pool.

    Turns go on until Prometheus has seen each target `SCRAPES` times.
    """
    front = stack.published("front", 8080)
    prometheus = stack.published("prometheus", 9090)
    with client() as http:
        number = 0
        fetched = False
        while not (fetched and _num_scrapes(prometheus) >= SCRAPES and number >= 6):
            session = Session(MODEL, f"Story number {number}, about caches. " * 100)
            session.turn(front, http)
            fetched = _fetch(stack, session, http) or fetched
            number += 1


def _fetch(stack: Stack, session: Session, http: httpx.Client) -> bool:
    """Let a session go on where it has never been; return whether the pool helped."""
    front = stack.published("front", 8080)
    replica = session.turn(front, http).replica
    drain(stack, replica)
    try:
        turn = session.turn(front, http)
    finally:
        drain(stack, replica, draining=False)
    return turn.predicted["pool"] > 0


@contextmanager
def experiment(stack: Stack) -> Iterator[None]:
    """Let two policies share the sessions meanwhile, by an order at one router."""
    arms = [{"name": "a", "policy": "kv_aware"}, {"name": "b", "policy": "least_loaded"}]
    body = {"name": "of-the-test", "design": "split", "arms": arms}
    url = f"{stack.published('router-1', 8081)}/admin/experiments"
    with httpx.Client(headers=_token(stack), trust_env=False, timeout=60.0) as admin:
        admin.post(url, json=body).raise_for_status()
        try:
            yield
        finally:
            admin.delete(f"{url}/of-the-test").raise_for_status()


def _token(stack: Stack) -> dict[str, str]:
    token = stack.mounted("router-1", "/run/secrets/admin_token").read_text()
    return {"Authorization": f"Bearer {token}"}


def drain(stack: Stack, replica: str, *, draining: bool = True) -> None:
    """Give an order at one router, with the token; return when the other one follows it."""
    with httpx.Client(headers=_token(stack), trust_env=False, timeout=60.0) as admin:
        first = stack.published("router-1", 8081)
        path = f"{first}/admin/replicas/{replica}/drain"
        admin.post(path, json={"draining": draining}).raise_for_status()
        for router, port in (("router-1", 8081), ("router-2", 8082)):
            url = f"{stack.published(router, port)}/admin/replicas"
            wait_until(
                lambda url=url: _is_draining(admin.get(url).json(), replica) == draining,
                f"{router} follows the order about {replica}",
            )


def wait_until_known(stack: Stack, session: Session, replica: str) -> None:
    """Return when both routers know what of the session `replica` holds, and would go on there."""
    with httpx.Client(headers=_token(stack), trust_env=False, timeout=60.0) as admin:
        for router, port in (("router-1", 8081), ("router-2", 8082)):
            url = f"{stack.published(router, port)}/admin/explain"
            wait_until(
                lambda url=url: _goes_on_at(
                    admin.post(url, json=session.body()).raise_for_status().json(), replica
                ),
                f"{router} knows that the session is at {replica}",
            )


def _goes_on_at(explained: dict[str, Any], replica: str) -> bool:
    return explained["decision"]["candidate"] == replica and any(
        candidate["view"]["id"] == replica
        and candidate["state"] == "exact"
        and candidate["view"]["num_gpu_tokens"] > 0
        for candidate in explained["candidates"]
    )


def _is_draining(found: dict[str, Any], replica: str) -> bool:
    return next(bool(r["draining"]) for r in found["replicas"] if r["name"] == replica)


def _num_scrapes(prometheus: str) -> float:
    return min(ask(prometheus, "count_over_time(up[10m])"), default=0.0)


def main() -> int:
    """Start the stack, drive it, ask, and show."""
    console = Console()
    console.width = max(console.width, 130)
    table = Table("row", "panel", "query of", "series", "value")
    with tempfile.TemporaryDirectory() as folder, emulated_stack(Path(folder)) as stack:
        with console.status("starting"):
            stack.up()
        with console.status("sending requests"), experiment(stack):
            make_traffic(stack)
            time.sleep(5)  # one more scrape
            asked = ask_all(stack.published("prometheus", 9090))
    for q in asked:
        table.add_row(q.row, q.panel, q.legend, str(len(q.values)), q.shown)
    console.print(table)
    empty = [q for q in asked if not q.values]
    console.print(f"{len(asked)} queries, {len(empty)} without data")
    return int(bool(empty))


if __name__ == "__main__":
    raise SystemExit(main())
