"""The emulated stack, as compose.yaml says it, driven through its one port."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis

from tests.compose.queries import (
    MODEL,
    ask_all,
    drain,
    experiment,
    make_traffic,
    wait_until_known,
)
from tests.compose.runner import Stack
from tests.compose.stacks import (
    NOT_HERE,
    Session,
    client,
    emulated_stack,
    wait_for_both,
    wait_until,
)
from tests.compose.test_prometheus import ALERTS, promtool

pytestmark = pytest.mark.timeout(400)

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service of compose.yaml but Grafana, healthy."""
    with emulated_stack(tmp_path_factory.mktemp("compose")) as running:
        running.up()
        wait_for_both(running)
        yield running


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with client() as opened:
        yield opened


@pytest.fixture
def front(stack: Stack) -> str:
    return stack.published("front", 8080)


def metric(url: str, name: str) -> float:
    """Sum a metric over its labels."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_every_service_is_healthy_by_its_own_check(stack: Stack) -> None:
    """As the files say it, all but Grafana."""
    wanted = [name for name in stack.project.services if name != NOT_HERE]

    assert len(wanted) == 7
    for name in wanted:
        assert stack.is_healthy(name), name


def test_a_session_is_cached_through_either_router(
    stack: Stack, front: str, http: httpx.Client
) -> None:
    """Later turns run where the first ran, from its cache, whichever router they came through."""
    session = Session(MODEL, "A story about two routers. " * 150)
    first = session.turn(front, http)
    wait_until_known(stack, session, first.replica)
    later = [session.turn(front, http) for _ in range(4)]

    assert {turn.replica for turn in later} == {first.replica}
    assert {turn.router for turn in later} == {"router-1", "router-2"}
    for turn in later:
        assert turn.num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
        assert turn.predicted["gpu"] > 0


def test_a_drained_replicas_sessions_go_on_from_the_pool(
    stack: Stack, front: str, http: httpx.Client
) -> None:
    """An order at one router, with the token, holds for both; what was computed is fetched."""
    session = Session(MODEL, "A story that moves house. " * 150)
    first = session.turn(front, http)
    wait_until_known(stack, session, first.replica)
    drain(stack, first.replica)
    try:
        # The pool's objects are learned beside the requests: the first turn there may be too early.
        turns = [session.turn(front, http) for _ in range(4)]
    finally:
        drain(stack, first.replica, draining=False)

    assert first.replica not in {turn.replica for turn in turns}
    assert turns[0].num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(("router", "port"), [("router-1", 8081), ("router-2", 8082)])
def test_the_admin_api_wants_its_token(stack: Stack, router: str, port: int) -> None:
    """From the secret's file; without it nothing is answered."""
    url = f"{stack.published(router, port)}/admin/replicas"
    token = stack.mounted(router, "/run/secrets/admin_token").read_text()

    assert httpx.get(url, trust_env=False).status_code == 401
    with_token = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    assert with_token.status_code == 200
    names = {replica["name"] for replica in with_token.json()["replicas"]}
    assert names == {"replica-1", "replica-2"}


def test_redis_wants_its_password(stack: Stack) -> None:
    """Which no list of processes shows."""
    host = stack.addresses["redis"]
    password = stack.mounted("redis", "/run/secrets/redis_password").read_text()

    with pytest.raises(redis.AuthenticationError):
        redis.Redis(host=host, port=6379).ping()
    server = redis.Redis(host=host, port=6379, password=password)
    assert server.config_get("maxmemory") == {"maxmemory": str(512 << 20)}
    assert server.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert password not in " ".join(stack.command("redis"))


def test_the_front_keeps_what_is_not_for_clients(front: str, stack: Stack) -> None:
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
def one_hung(stack: Stack, http: httpx.Client) -> Iterator[None]:
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
    stack: Stack, front: str, http: httpx.Client
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


def test_every_target_is_scraped(stack: Stack) -> None:
    """Routers, engines, front, pool's master and Prometheus itself."""
    url = f"{stack.published('prometheus', 9090)}/api/v1/targets"

    def jobs() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for target in httpx.get(url, trust_env=False).json()["data"]["activeTargets"]:
            found.setdefault(target["labels"]["job"], []).append(target["health"])
        return found

    up = {"warmroute": 2, "engine": 2, "front": 1, "mooncake": 1, "prometheus": 1}
    wait_until(lambda: jobs() == {job: ["up"] * n for job, n in up.items()}, "all targets are up")


def test_prometheus_has_loaded_the_rules(stack: Stack) -> None:
    """All of them, and evaluates them without an error."""
    url = f"{stack.published('prometheus', 9090)}/api/v1/rules"

    def rules() -> list[dict[str, Any]]:
        groups = httpx.get(url, trust_env=False).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), "all rules are evaluated")
    assert {rule["name"] for rule in rules()} == {rule["alert"] for rule in ALERTS}


def test_promtool_accepts_the_configuration(stack: Stack) -> None:
    """As it is mounted: with its rules and its targets."""
    said = promtool(
        "check", "config", stack.mounted("prometheus", "/etc/prometheus/prometheus.yml")
    )

    assert "SUCCESS" in said
    assert f"{len(ALERTS)} rules found" in said


def test_every_query_returns_data(stack: Stack) -> None:
    """After sessions at both replicas, in both arms, fetches from the pool, and a few scrapes."""
    prometheus = stack.published("prometheus", 9090)

    def empty() -> list[str]:
        return [f"{q.panel}: {q.expr}" for q in ask_all(prometheus) if not q.values]

    with experiment(stack):
        make_traffic(stack)
        until_s = time.monotonic() + 180
        while missing := empty():  # rates over the last minute, of which a slow machine needs all
            assert time.monotonic() < until_s, f"no data for {missing}"
            make_traffic(stack)


# -- what dies: each leaves the stack as it was ---------------------------------------------------


def begin_at(replica: str, stack: Stack, opening: str, http: httpx.Client) -> Session:
    """Let a replica compute a session's opening; return when both routers know, by its events.

    No router passes it on: its claim would count as known for a second, and die with it.
    """
    session = Session(MODEL, opening)
    url = f"{stack.url(replica, 8000)}/v1/chat/completions"
    http.post(url, json=session.body()).raise_for_status()
    wait_until_known(stack, session, replica)
    return session


def test_a_router_killed_is_not_missed(stack: Stack, front: str, http: httpx.Client) -> None:
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
    stack: Stack, front: str, http: httpx.Client
) -> None:
    """Before its first byte, waiting or computed: 502 in the API's shape."""
    names = ("router-1", "router-2")
    sessions = 'haproxy_server_current_sessions{proxy="routers",server="%s"}'

    def owner() -> str | None:
        """Return which router has it at an engine: the front knows; each counts the other's."""
        if not any(metric(stack.url(name, 8080), "warmroute_inflight_requests{") for name in names):
            return None
        front_own = stack.url("front", 8404)
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


def test_a_replica_killed_is_not_missed(stack: Stack, front: str, http: httpx.Client) -> None:
    """Its session goes on at the other one; no client sees it."""
    session = Session(MODEL, "A story about a replica that dies. " * 120)
    drain(stack, "replica-1")  # which has the emulated pool: the other one is to die
    try:
        assert session.turn(front, http).replica == "replica-2"
    finally:
        drain(stack, "replica-1", draining=False)
    stack.kill("replica-2")
    try:
        turns = [session.turn(front, http) for _ in range(3)]
    finally:
        stack.start("replica-2")
        stack.wait_healthy("replica-2")

    assert {turn.replica for turn in turns} == {"replica-1"}


def test_redis_killed_is_not_missed(stack: Stack, front: str, http: httpx.Client) -> None:
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
        [*map(str, turns), stack.log("router-1"), stack.log("router-2")]
    )
    stack.wait_healthy("redis")
    wait_until(shared(1.0), "the routers share again")


def test_no_router_at_all_is_said_in_the_apis_shape(
    stack: Stack, front: str, http: httpx.Client
) -> None:
    """503 with a reason and when to come back; and the front calls itself unhealthy."""
    for name in ("router-1", "router-2"):
        stack.kill(name)
    try:
        body = {"model": MODEL, "prompt": "hello?"}
        wait_until(lambda: not stack.is_healthy("front"), "the front is unhealthy")
        answer = http.post(f"{front}/v1/completions", json=body)
    finally:
        for name in ("router-1", "router-2"):
            stack.start(name)

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert json.loads(answer.content)["error"]["code"] == "no_router_available"
    for name in ("router-1", "router-2", "front"):
        stack.wait_healthy(name)
