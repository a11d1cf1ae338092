"""docker/compose.gpu.yaml in containers with real engines: vLLM's CPU build and Mooncake.

compose.cpu.yaml is laid over the file: the engines are mounted, and need no GPU. All else, the
model's name and the pool's size too, is the file's own, or set by its variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from loadtest.engines.vllm import BLOCK_SIZE, MAX_MODEL_LEN
from loadtest.tiny_model import MODEL_DIR
from tests.compose.queries import ask
from tests.compose.stacks import COMPOSE_GPU, ROOT, Session, client, wait_until
from tests.containers.stack import Containers, build_stand_in
from tests.containers.traffic import MODEL, drained, metric, wait_for_both, wait_until_pooled

FOLDER = Path(__file__).parent
ENGINES = (ROOT / ".engines").resolve()
PRELOAD = ENGINES / "yield.so"
PYTHON = "3.11"  # of the image
VARIABLES = {
    "MODEL": f"/models/{MODEL_DIR.name}",
    "MODELS_DIR": str(MODEL_DIR.parent),
    "SERVED_MODEL_NAME": MODEL,
    "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
    "POOL_SEGMENT_SIZE": "64MB",
    "POOL_BUFFER_SIZE": "64MB",
    "ENGINES_DIR": str(ENGINES),
    "ENGINES_SITE": str(ROOT / "loadtest/engines/site"),
    "ENGINES_PRELOAD": "/engines/yield.so" if PRELOAD.exists() else "",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Every service of compose.gpu.yaml, healthy; both routers know both replicas."""
    if not (ENGINES / f"venv/lib/python{PYTHON}").exists():
        pytest.skip(f"needs tests/engines/install.sh, by Python {PYTHON}")
    folder = tmp_path_factory.mktemp("engines")
    image = build_stand_in("vllm-cpu")
    # vLLM's facts about a model's class are kept there: 12 s of processor time otherwise.
    cache = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    variables = {**VARIABLES, "VLLM_IMAGE": image, "VLLM_CACHE_ROOT": cache}
    with Containers(COMPOSE_GPU, folder, variables, FOLDER / "compose.cpu.yaml") as running:
        running.up()
        for name in running.admins:  # ready with the first replica that it finds
            url = running.url(name, 8080)
            healthy = partial(metric, url, "warmroute_replica_healthy{")
            wait_until(lambda healthy=healthy: healthy() == 2, f"{name} has found both", 120)
        wait_for_both(running)
        yield running


def test_a_session_is_cached_through_either_router(stack: Containers) -> None:
    """Later turns run where the first ran, from its cache, whichever router they came through."""
    session = Session(MODEL, "A story about real engines. " * 150)
    with client() as http:
        first = session.turn(stack.front, http)
        later = [session.turn(stack.front, http) for _ in range(3)]

    assert {turn.replica for turn in later} == {first.replica}
    assert {turn.router for turn in later} == {"router-1", "router-2"}
    for turn in later:
        assert turn.num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_what_one_has_computed_the_other_fetches(stack: Containers) -> None:
    """Its replica drains: the other one, that never saw the session, has it from the pool."""
    session = Session(MODEL, "A story that changes places. " * 150)
    with client() as http:
        first = session.turn(stack.front, http)
        second = session.turn(stack.front, http)
        num_tokens = first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
        wait_until_pooled(stack, session, num_tokens)
        with drained(stack, second.replica):
            third = session.turn(stack.front, http)

    assert second.replica == first.replica != third.replica
    assert third.predicted["pool"] > 0
    assert third.num_cached_tokens >= num_tokens


def test_prometheus_sees_all_of_it(stack: Containers) -> None:
    """Routers, engines, front and master are scraped; both caches are known exactly."""
    url = stack.prometheus

    wait_until(lambda: len(ask(url, "up == 1")) == 7, "every target is up")
    wait_until(lambda: ask(url, "sum(vllm:prompt_tokens_total)")[0] > 0, "engines count")
    wait_until(lambda: ask(url, "master_key_count")[0] > 0, "the master counts")
    exact = 'sum(max by (replica) (warmroute_replica_state{state="exact"}))'
    wait_until(lambda: ask(url, exact) == (2.0,), "both are EXACT")
