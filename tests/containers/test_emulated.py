"""docker/compose.yaml in containers: driven through its one port, killed in parts, updated."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from tests.compose.queries import ask_all
from tests.compose.stacks import ALERTS, COMPOSE, ROOT, Session, Turn, client, wait_until
from tests.containers.stack import Containers
from tests.containers.traffic import (
    MODEL,
    admin,
    drained,
    make_traffic,
    metric,
    wait_for_both,
    wait_until_known,
)

NUM_CLIENTS = 4
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Every service of compose.yaml, healthy."""
    with Containers(COMPOSE, tmp_path_factory.mktemp("emulated")) as running:
        running.up()
        wait_for_both(running)
        yield running


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with client() as opened:
        yield opened


@pytest.fixture
def front(stack: Containers) -> str:
    return stack.front


def test_every_service_is_healthy(stack: Containers) -> None:
    """`docker compose up --wait` returned, and every health check of the file passes."""
    health = stack.services()

    assert len(health) == 8
    assert health == dict.fromkeys(health, "healthy")


def test_a_session_is_cached_through_either_router(stack: Containers) -> None:
    """Both routers send a conversation to the replica that has its blocks."""
    session = Session(MODEL, "A story about two routers. " * 150)
    with client() as http:
        first = session.turn(stack.front, http)
        later = [session.turn(stack.front, http) for _ in range(4)]

    assert {turn.replica for turn in later} == {first.replica}
    assert {turn.router for turn in later} == {"router-1", "router-2"}
    assert all(turn.num_cached_tokens > 0 for turn in later)


def test_the_admin_api_answers_inside_the_container(stack: Containers) -> None:
    """The command of docs/deploy.md lists both replicas."""
    token = ("--token-file", "/run/secrets/admin_token")
    listed = stack.compose("exec", "-T", "router-1", "warmroute", "replicas", "list", *token)

    assert "replica-1" in listed
    assert "replica-2" in listed


@pytest.mark.parametrize("router", ["router-1", "router-2"])
def test_the_admin_api_wants_its_token(stack: Containers, router: str) -> None:
    """From the secret's file; without it nothing is answered."""
    url = f"{stack.admins[router]}/admin/replicas"

    assert httpx.get(url, trust_env=False).status_code == 401
    with admin(stack) as http:
        names = {replica["name"] for replica in http.get(url).json()["replicas"]}
    assert names == {"replica-1", "replica-2"}


def test_redis_wants_its_password(stack: Containers) -> None:
    """Which no list of processes shows."""
    password = stack.secret("redis_password")
    limits = ("config", "get", "maxmemory*")

    def redis_cli(*words: str) -> str:
        return stack.compose("exec", "-T", "redis", "redis-cli", "--raw", *words)

    assert "NOAUTH" in redis_cli("ping")
    found = redis_cli("-a", password, "--no-auth-warning", *limits).split()
    assert found[found.index("maxmemory") + 1] == str(512 << 20)
    assert found[found.index("maxmemory-policy") + 1] == "noeviction"
    assert password not in stack.compose("top", "redis")


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
    url = f"{stack.prometheus}/api/v1/targets"

    def health() -> list[str]:
        found = httpx.get(url, trust_env=False).json()["data"]["activeTargets"]
        return [target["health"] for target in found]

    wait_until(lambda: health() == ["up"] * 7, "every target is up")


def test_a_drained_replicas_sessions_go_on_from_the_pool(
    stack: Containers, front: str, http: httpx.Client
) -> None:
    """An order at one router, with the token, holds for both; what was computed is fetched."""
    session = Session(MODEL, "A story that moves house. " * 150)
    first = session.turn(front, http)
    wait_until_known(stack, session, first.replica)
    with drained(stack, first.replica):
        # The pool's objects are learned beside the requests: the first turn there may be too early.
        turns = [session.turn(front, http) for _ in range(4)]

    assert first.replica not in {turn.replica for turn in turns}
    assert turns[0].num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_the_front_keeps_what_is_not_for_clients(front: str, stack: Containers) -> None:
    """Metrics are a 404 there, readiness is not; the routers' own pages answer inside."""
    assert httpx.get(f"{front}/metrics", trust_env=False).status_code == 404
    assert httpx.get(f"{front}/readyz", trust_env=False).status_code == 200
    assert metric(stack.url("router-1", 8080), "warmroute_routers") == 2


def test_bytes_come_as_they_are_sent(front: str, http: httpx.Client) -> None:
    """An answer that takes a while arrives piece by piece, not at its end."""
    body = {"model": MODEL, "prompt": "slowly", "max_tokens": 400, "stream": True}
    num_pieces = 0
    with http.stream("POST", f"{front}/v1/completions", json=body) as answer:
        for _ in answer.iter_raw():
            num_pieces += 1

    assert num_pieces > 5


@contextmanager
def one_hung(stack: Containers, http: httpx.Client) -> Iterator[None]:
    """Have the next request hang, whichever replica it comes to."""
    faults = [f"{stack.url(name, 8000)}/emulator/faults" for name in ("replica-1", "replica-2")]
    for url in faults:
        http.post(url, json={"kind": "hang", "count": 1})
    try:
        yield
    finally:
        for url in faults:
            http.delete(url)


def test_a_client_that_leaves_ends_the_engines_work(
    stack: Containers, front: str, http: httpx.Client
) -> None:
    """Before its first byte, through the front: nothing is computed for a client that left."""
    routers = [stack.url(name, 8080) for name in ("router-1", "router-2")]

    def num_gone() -> int:
        texts = [httpx.get(f"{url}/metrics", trust_env=False).text for url in routers]
        return sum(line.count('outcome="client_gone"') for text in texts for line in text.split())

    before = num_gone()
    in_flight = "warmroute_inflight_requests{"
    request = http.build_request(
        "POST", f"{front}/v1/completions", json={"model": MODEL, "prompt": "leaving"}
    )
    with one_hung(stack, http):
        with socket.create_connection((request.url.host, request.url.port), 60.0) as client:
            head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            path = request.url.raw_path.decode()
            client.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
            wait_until(lambda: sum(metric(url, in_flight) for url in routers), "it is in flight")

        wait_until(lambda: num_gone() > before, "the router notices that the client left")
        wait_until(
            lambda: not sum(metric(url, in_flight) for url in routers), "nothing is in flight"
        )


# -- what Prometheus sees of it ------------------------------------------------------------------


def test_prometheus_has_loaded_the_rules(stack: Containers) -> None:
    """All of them, and evaluates them without an error."""
    url = f"{stack.prometheus}/api/v1/rules"

    def rules() -> list[dict[str, Any]]:
        groups = httpx.get(url, trust_env=False).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), "all rules are evaluated")
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert {rule["name"] for rule in rules()} == alerts


def test_every_query_returns_data(stack: Containers) -> None:
    """After sessions at both replicas, fetches from the pool, and a few scrapes."""

    def empty() -> list[str]:
        return [f"{q.panel}: {q.expr}" for q in ask_all(stack.prometheus) if not q.values]

    make_traffic(stack)
    until_s = time.monotonic() + 180
    while missing := empty():  # rates over the last minute, of which a slow machine needs all
        assert time.monotonic() < until_s, f"no data for {missing}"
        make_traffic(stack)


# -- what dies: each leaves the stack as it was ---------------------------------------------------


def begin_at(replica: str, stack: Containers, opening: str, http: httpx.Client) -> Session:
    """Let a replica compute a session's opening; return when both routers know, by its events.

    No router passes it on: its claim would count as known for a second, and die with it.
    """
    session = Session(MODEL, opening)
    url = f"{stack.url(replica, 8000)}/v1/chat/completions"
    http.post(url, json=session.body()).raise_for_status()
    wait_until_known(stack, session, replica)
    return session


def test_a_router_killed_is_not_missed(stack: Containers, front: str, http: httpx.Client) -> None:
    """Every request after it is answered by the other one, from the same caches; it comes back."""
    session = begin_at("replica-1", stack, "A story about a router that dies. " * 120, http)
    stack.kill("router-1")
    try:
        turns = [session.turn(front, http) for _ in range(6)]
    finally:
        stack.start("router-1")

    assert {turn.router for turn in turns} == {"router-2"}
    assert {turn.replica for turn in turns} == {"replica-1"}
    assert all(turn.num_cached_tokens > 0 for turn in turns)
    stack.wait_healthy("router-1")
    wait_until(
        lambda: "router-1" in {session.turn(front, http).router for _ in range(2)},
        "the front sends requests to it again",
    )


def test_a_router_that_dies_with_a_request_is_one_clear_error(
    stack: Containers, front: str, http: httpx.Client
) -> None:
    """Before its first byte, waiting or computed: 502 in the API's shape."""
    names = ("router-1", "router-2")
    sessions = 'haproxy_server_current_sessions{proxy="routers",server="%s"}'

    routers = [stack.url(name, 8080) for name in names]
    front_own = stack.url("front", 8404)

    def owner() -> str | None:
        """Return which router has it at an engine: the front knows; each counts the other's."""
        if not any(metric(url, "warmroute_inflight_requests{") for url in routers):
            return None
        return next((name for name in names if metric(front_own, sessions % name)), None)

    with one_hung(stack, http), ThreadPoolExecutor(1) as threads:
        body = {"model": MODEL, "prompt": "a router that dies with this"}
        asked = threads.submit(http.post, f"{front}/v1/completions", json=body)
        name = wait_until(owner, "it is in flight")
        stack.kill(name)
        try:
            answer = asked.result(60.0)
        finally:
            stack.start(name)

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "router_lost"
    assert answer.headers["retry-after"] == "1"
    stack.wait_healthy(name)
    wait_for_both(stack)


def test_a_replica_killed_is_not_missed(stack: Containers, front: str, http: httpx.Client) -> None:
    """Its session goes on at the other one; no client sees it."""
    session = Session(MODEL, "A story about a replica that dies. " * 120)
    with drained(stack, "replica-1"):  # which has the emulated pool: the other one is to die
        assert session.turn(front, http).replica == "replica-2"
    stack.kill("replica-2")
    try:
        turns = [session.turn(front, http) for _ in range(3)]
    finally:
        stack.start("replica-2")
        stack.wait_healthy("replica-2")

    assert {turn.replica for turn in turns} == {"replica-1"}


def test_redis_killed_is_not_missed(stack: Containers, front: str, http: httpx.Client) -> None:
    """Each router goes on alone, and together again when it is back, empty."""
    routers = [stack.url(name, 8080) for name in ("router-1", "router-2")]

    def shared(value: float) -> Callable[[], bool]:
        return lambda: all(metric(url, "warmroute_redis_up") == value for url in routers)

    session = begin_at("replica-1", stack, "A story about a server that forgets. " * 120, http)
    stack.kill("redis")
    try:
        wait_until(shared(0.0), "the routers notice")
        turns = [session.turn(front, http) for _ in range(4)]
    finally:
        stack.start("redis")

    assert {turn.replica for turn in turns} == {"replica-1"}, "\n".join(
        [*map(str, turns), stack.compose("logs", "--no-color", "router-1", "router-2")]
    )
    stack.wait_healthy("redis")
    wait_until(shared(1.0), "the routers share again")


def test_no_router_at_all_is_said_in_the_apis_shape(
    stack: Containers, front: str, http: httpx.Client
) -> None:
    """503 with a reason and when to come back; and the front is not ready."""
    for name in ("router-1", "router-2"):
        stack.kill(name)
    try:
        body = {"model": MODEL, "prompt": "hello?"}
        wait_until(lambda: http.get(f"{front}/readyz").status_code == 503, "the front is not ready")
        answer = http.post(f"{front}/v1/completions", json=body)
    finally:
        for name in ("router-1", "router-2"):
            stack.start(name)

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert json.loads(answer.content)["error"]["code"] == "no_router_available"
    for name in ("router-1", "router-2", "front"):
        stack.wait_healthy(name)


# -- what is updated ------------------------------------------------------------------------------


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
                turns.append(session.turn(stack.front, http))

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
