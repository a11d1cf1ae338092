"""Drive a stack in containers: traffic of every kind, and orders at its admin APIs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.compose.queries import ask
from tests.compose.stacks import Session, client, wait_until
from tests.containers.stack import Containers

MODEL = "tiny"
SCRAPES = 3  # of each target, before and after traffic of every kind


def admin(stack: Containers) -> httpx.Client:
    """Make a client with the token of the admin APIs."""
    token = {"Authorization": f"Bearer {stack.secret('admin_token')}"}
    return httpx.Client(headers=token, trust_env=False, timeout=60.0)


def make_traffic(stack: Containers) -> None:
    """Cause what the dashboard shows: sessions at both replicas, and fetches from the pool.

    Turns go on until Prometheus has seen each target `SCRAPES` times.
    """
    with client() as http:
        number = 0
        fetched = False
        while not (fetched and _num_scrapes(stack.prometheus) >= SCRAPES and number >= 6):
            session = Session(MODEL, f"Story number {number}, about caches. " * 100)
            session.turn(stack.front, http)
            fetched = _fetch(stack, session, http) or fetched
            number += 1


def metric(url: str, name: str) -> float:
    """Sum a metric over its labels."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _fetch(stack: Containers, session: Session, http: httpx.Client) -> bool:
    """Let a session go on where it has never been; return whether the pool helped."""
    replica = session.turn(stack.front, http).replica
    with drained(stack, replica):
        turn = session.turn(stack.front, http)
    return turn.predicted["pool"] > 0


@contextmanager
def drained(stack: Containers, replica: str) -> Iterator[None]:
    """Drain a replica meanwhile."""
    _order(stack, replica, draining=True)
    try:
        yield
    finally:
        _order(stack, replica, draining=False)


def _order(stack: Containers, replica: str, *, draining: bool) -> None:
    """Give an order at one router; return when the other one follows it."""
    with admin(stack) as http:
        path = f"{stack.admins['router-1']}/admin/replicas/{replica}/drain"
        http.post(path, json={"draining": draining}).raise_for_status()
        for router, url in stack.admins.items():
            wait_until(
                lambda url=url: (
                    _is_draining(http.get(f"{url}/admin/replicas").json(), replica) == draining
                ),
                f"{router} follows the order about {replica}",
            )


def wait_until_known(stack: Containers, session: Session, replica: str) -> None:
    """Return when both routers know what of the session `replica` holds, and would go on there."""
    with admin(stack) as http:
        for router, url in stack.admins.items():
            wait_until(
                lambda url=url: _goes_on_at(
                    http.post(f"{url}/admin/explain", json=session.body())
                    .raise_for_status()
                    .json(),
                    replica,
                ),
                f"{router} knows that the session is at {replica}",
            )


def wait_until_pooled(stack: Containers, session: Session, num_tokens: int) -> None:
    """Return when both routers know that the pool has so many tokens of the session."""
    with admin(stack) as http:
        for router, url in stack.admins.items():
            wait_until(
                lambda url=url: (
                    http.post(f"{url}/admin/explain", json=session.body())
                    .raise_for_status()
                    .json()["num_pool_tokens"]
                    >= num_tokens
                ),
                f"{router} knows that the pool has the session",
                60,  # the first listing comes some seconds after a start
            )


def wait_for_both(stack: Containers) -> None:
    """Return once the front sends requests to either router: HAProxy asks each once a second."""
    seen = set()
    with client() as http:

        def both() -> bool:
            seen.add(http.get(f"{stack.front}/readyz").headers.get("x-served-by"))
            return {"router-1", "router-2"} <= seen

        wait_until(both, "the front knows both routers")


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
