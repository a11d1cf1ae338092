"""docker/compose.yaml in containers: healthy, restricted, and updated without a lost request."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from tests.compose.queries import MODEL
from tests.compose.runner import ROOT
from tests.compose.stacks import COMPOSE, Session, Turn, client, wait_until
from tests.containers.stack import Containers

NUM_CLIENTS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Every service of compose.yaml, healthy."""
    with Containers(COMPOSE, tmp_path_factory.mktemp("emulated")) as running:
        running.up()
        yield running


def test_every_service_is_healthy(stack: Containers) -> None:
    """`docker compose up --wait` returned, and every health check of the file passes."""
    assert len(stack.services()) == 8
    assert set(stack.services().values()) == {"healthy"}


def test_a_session_is_cached_through_either_router(stack: Containers) -> None:
    """Both routers send a conversation to the replica that has its blocks."""
    session = Session(MODEL, "A story about two routers. " * 150)
    with client() as http:
        first = session.turn(stack.url, http)
        later = [session.turn(stack.url, http) for _ in range(4)]

    assert {turn.replica for turn in later} == {first.replica}
    assert {turn.router for turn in later} == {"router-1", "router-2"}
    assert all(turn.num_cached_tokens > 0 for turn in later)


def test_the_admin_api_answers_inside_the_container(stack: Containers) -> None:
    """The command of docs/deploy.md lists both replicas."""
    token = ("--token-file", "/run/secrets/admin_token")
    listed = stack.compose("exec", "-T", "router-1", "warmroute", "replicas", "list", *token)

    assert "replica-1" in listed
    assert "replica-2" in listed


def test_the_daemon_applies_the_restrictions(stack: Containers) -> None:
    """Each container runs as another user than root, without capabilities, on a read-only root."""
    for service in stack.services():
        found = stack.inspect(service)
        assert found["Config"]["User"].partition(":")[0] not in ("", "0", "root"), service
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert found["HostConfig"]["ReadonlyRootfs"] is True
        for bindings in found["HostConfig"]["PortBindings"].values():
            assert {binding["HostIp"] for binding in bindings} == {"127.0.0.1"}


def test_replicas_cannot_reach_redis(stack: Containers) -> None:
    """They share no network with it, so its name does not resolve there."""
    code = "import socket; socket.create_connection(('redis', 6379), 2)"
    with pytest.raises(AssertionError, match="gaierror"):
        stack.compose("exec", "-T", "replica-1", "python", "-c", code)
    stack.compose("exec", "-T", "router-1", "python", "-c", code)


def test_prometheus_scrapes_every_target(stack: Containers) -> None:
    """Routers, engines, front, the pool's master and Prometheus itself."""
    url = f"http://127.0.0.1:{stack.ports['PROMETHEUS_PORT']}/api/v1/targets"

    def health() -> list[str]:
        found = httpx.get(url, trust_env=False).json()["data"]["activeTargets"]
        return [target["health"] for target in found]

    wait_until(lambda: health() == ["up"] * 7, "every target is up")


def test_a_rolling_update_under_load_loses_nothing(stack: Containers) -> None:
    """Build another image, replace both routers one by one: each request gets its whole answer."""
    before = {name: stack.inspect(name) for name in ("router-1", "router-2")}
    image = before["router-1"]["Config"]["Image"]
    build = ["docker", "build", "-q", "-f", "docker/Dockerfile", "-t", image]
    subprocess.run([*build, "--label", f"t={time.time()}", "."], cwd=ROOT, check=True)
    done = Event()
    turns: list[Turn] = []

    def drive(number: int) -> None:
        with client() as http:
            session = Session(MODEL, f"Story number {number}. " * 50)
            while not done.is_set():
                turns.append(session.turn(stack.url, http))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        driving = [threads.submit(drive, number) for number in range(NUM_CLIENTS)]
        try:
            wait_until(lambda: len(turns) > NUM_CLIENTS, "clients get answers")
            for name in ("router-1", "router-2"):
                num_before = len(turns)
                stack.up("--no-deps", name)
                wait_until(
                    lambda name=name, n=num_before: name in {turn.router for turn in turns[n:]},
                    f"{name} serves again",
                )
        finally:
            done.set()
    for each in driving:
        each.result()  # a request that failed raises here

    for name, old in before.items():
        assert stack.inspect(name)["Image"] != old["Image"]
    print(f"{len(turns)} requests, none lost")
