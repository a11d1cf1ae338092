"""The compose files for GPUs, in containers, with a stand-in for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stacks import COMPOSE_GPU, COMPOSE_MINIMAL, Session, client, wait_until
from tests.containers.stack import Containers, build_stand_in

SERVICES = {
    COMPOSE_MINIMAL: {"router", "engine-1", "engine-2"},
    COMPOSE_GPU: {
        "mooncake-master", "replica-1", "replica-2", "router-1", "router-2", "front", "redis",
        "prometheus", "grafana",
    },
}  # fmt: skip
NAME = "our-model"


@pytest.fixture(scope="module", params=SERVICES, ids=lambda file: file.name)
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Containers]]:
    """Every service of one file, healthy, with a model name of our own."""
    folder = tmp_path_factory.mktemp("gpu")
    image = build_stand_in("vllm")
    variables = {"MODEL": "/models/any", "SERVED_MODEL_NAME": NAME, "VLLM_IMAGE": image}
    with Containers(request.param, folder, variables) as running:
        try:
            running.up()
        except AssertionError as error:
            if "could not select device driver" in str(error):
                pytest.skip("this daemon has no GPUs to give")
            raise
        yield request.param, running


def test_every_service_is_healthy(stack: tuple[Path, Containers]) -> None:
    """`docker compose up --wait` returned, and every health check of the file passes."""
    file, running = stack

    assert running.services() == dict.fromkeys(SERVICES[file], "healthy")


def test_each_engine_has_a_gpu_of_its_own(stack: tuple[Path, Containers]) -> None:
    """Docker is asked for GPU 0 and for GPU 1."""
    file, running = stack
    engines = sorted(name for name in SERVICES[file] if name.startswith(("engine-", "replica-")))

    asked = [running.inspect(name)["HostConfig"]["DeviceRequests"] for name in engines]
    assert [request["DeviceIDs"] for (request,) in asked] == [["0"], ["1"]]


def test_a_session_stays_with_its_cache(stack: tuple[Path, Containers]) -> None:
    """Later turns run where the first ran, from its cache, which the router predicts."""
    _, running = stack
    session = Session(NAME, "A story about GPUs. " * 150)
    with client() as http:
        first = session.turn(running.front, http)
        later = [session.turn(running.front, http) for _ in range(3)]

    assert {turn.replica for turn in later} == {first.replica}
    assert all(turn.num_cached_tokens > 0 for turn in later)
    assert later[-1].predicted["gpu"] > 0


def test_the_cache_of_the_engine_that_was_used_is_known_exactly(
    stack: tuple[Path, Containers],
) -> None:
    """KV events arrive in containers: `warmroute replicas list` says EXACT."""
    file, running = stack
    router = "router" if file == COMPOSE_MINIMAL else "router-1"
    token = () if file == COMPOSE_MINIMAL else ("--token-file", "/run/secrets/admin_token")
    words = ("exec", "-T", router, "warmroute", "replicas", "list", *token)

    wait_until(lambda: "exact" in running.compose(*words), "the engine of the session is EXACT")
