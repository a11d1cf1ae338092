"""docker/compose.gpu.yaml with real engines: its services, commands, health checks, as processes.

What runs is what the file says (tests.compose.runner), but for this table, GPU -> CPU:

    the image's `vllm serve MODEL`      the CPU build's module, `--model MODEL`
    weights                             dummy ones of the tiny model (`--load-format dummy`)
    a cache as large as the GPU         `NUM_BLOCKS` blocks of 32 tokens (the CPU wants 32)
    compiled kernels                    `--enforce-eager`
    event ports 5557 …                  free ones: `tcp://*` binds all addresses of this machine
    -                                   the CPU build's own variables (tests.engines.harness)

Everything else, the model's name and the pool's size too, is set by the file's own variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.compose.queries import MODEL, ask, drain
from tests.compose.runner import Image, Stack
from tests.compose.stacks import (
    COMPOSE_GPU,
    Session,
    client,
    images,
    make_secrets,
    project,
    runnable,
    wait_for_both,
    wait_until,
)
from tests.engines.harness import (
    BLOCK_SIZE,
    ENVIRON,
    MAX_MODEL_LEN,
    MODEL_DIR,
    NUM_BLOCKS,
    engine_python,
    read_metric,
)
from tests.ports import free_port

VARIABLES = {
    "MODEL": f"/models/{MODEL_DIR.name}",
    "MODELS_DIR": str(MODEL_DIR.parent),
    "SERVED_MODEL_NAME": MODEL,
    "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
    "POOL_SEGMENT_SIZE": "64MB",
    "POOL_BUFFER_SIZE": "64MB",
    "MOONCAKE_PROTOCOL": "tcp",
}
ADDED = [
    "--load-format=dummy",
    f"--block-size={BLOCK_SIZE}",
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
    "--enforce-eager",
]
ENVIRON = {
    **{k: v for k, v in ENVIRON.items() if k != "VLLM_HOST_IP"},  # the file sets it
    # What vLLM has found out about a model's class: 12 s of processor time otherwise.
    "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm")),
}


@cache
def event_port(port: str) -> int:
    """One free port for each that the file names."""
    return free_port()


def on_cpu(name: str, words: list[str]) -> list[str]:
    """Exchange what the table says."""
    if name == "mooncake-master":
        return [str(engine_python().parent / words[0]), *words[1:]]
    if not name.startswith("replica-"):
        return words
    words = [re.sub(r"(?<=tcp://\*:)\d+", lambda p: str(event_port(p[0])), w) for w in words]
    return [*words, *ADDED]


@pytest.fixture(scope="module")
def gpu_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service of compose.gpu.yaml but Grafana, healthy."""
    folder = tmp_path_factory.mktemp("gpu")
    python = str(engine_python())
    module = (python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    known = {
        **images(),
        "vllm/vllm-openai": Image(entrypoint=module, environment=ENVIRON),
    }
    variables = {**VARIABLES, "HF_CACHE_DIR": str(folder / "hub")}
    found = project(COMPOSE_GPU, make_secrets(folder / "secrets"), variables)
    with runnable(found, folder, known, given=("mooncake_master",), substitute=on_cpu) as stack:
        stack.up()
        for router in ("router-1", "router-2"):  # ready with the first replica they find
            metrics = f"{stack.url(router, 8080)}/metrics"
            wait_until(lambda url=metrics: num_healthy(url) == 2, f"{router} has found both", 120)
        wait_for_both(stack)
        yield stack


def num_healthy(metrics: str) -> float:
    """Count the replicas that a router may send requests to."""
    return read_metric(httpx.get(metrics, trust_env=False).text, "warmroute_replica_healthy")


@pytest.mark.timeout(900)
def test_a_session_is_cached_through_either_router(gpu_stack: Stack) -> None:
    """Later turns run where the first ran, from its cache, whichever router they came through."""
    front = gpu_stack.published("front", 8080)
    session = Session(MODEL, "A story about real engines. " * 150)
    with client() as http:
        first = session.turn(front, http)
        later = [session.turn(front, http) for _ in range(3)]

    assert {turn.replica for turn in later} == {first.replica}
    assert {turn.router for turn in later} == {"router-1", "router-2"}
    for turn in later:
        assert turn.num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_what_one_has_computed_the_other_fetches(gpu_stack: Stack) -> None:
    """Its replica drains: the other one, that never saw the session, has it from the pool."""
    front = gpu_stack.published("front", 8080)
    session = Session(MODEL, "A story that changes places. " * 150)
    with client() as http:
        first = session.turn(front, http)
        second = session.turn(front, http)
        drain(gpu_stack, second.replica)
        try:
            third = session.turn(front, http)
        finally:
            drain(gpu_stack, second.replica, draining=False)

    assert second.replica == first.replica != third.replica
    assert third.predicted["pool"] > 0
    assert third.num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_prometheus_sees_all_of_it(gpu_stack: Stack) -> None:
    """Routers, engines, front and master are scraped; both caches are known exactly."""
    prometheus = gpu_stack.published("prometheus", 9090)

    wait_until(lambda: len(ask(prometheus, "up == 1")) == 7, "every target is up")
    jobs = {
        result["metric"]["job"]
        for result in httpx.get(
            f"{prometheus}/api/v1/query", params={"query": "up"}, trust_env=False
        ).json()["data"]["result"]
    }
    assert jobs == {"warmroute", "engine", "front", "mooncake", "prometheus"}
    wait_until(lambda: ask(prometheus, "sum(vllm:prompt_tokens_total)")[0] > 0, "engines count")
    wait_until(lambda: ask(prometheus, "master_key_count")[0] > 0, "the master counts")
    exact = 'sum(max by (replica) (warmroute_replica_state{state="exact"}))'
    wait_until(lambda: ask(prometheus, exact) == (2.0,), "both are EXACT")


def test_the_files_values_reach_the_engines(gpu_stack: Stack) -> None:
    """What the compose file mounts and sets is what runs: no value of it is lost on the way."""
    settings = gpu_stack.mounted("replica-1", "/etc/mooncake/mooncake.json").read_text()

    assert f'"{gpu_stack.host}:50051"' in settings
    assert '"protocol": "tcp"' in settings
    for name in ("replica-1", "replica-2"):
        words = gpu_stack.command(name)
        assert any('"kv_load_failure_policy":"recompute"' in word for word in words)
        assert gpu_stack.environment(name)["PYTHONHASHSEED"] == "0"
        assert Path(words[4]) == MODEL_DIR
