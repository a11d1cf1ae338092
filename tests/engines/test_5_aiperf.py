"""AIPerf, NVIDIA's load generator, unchanged: it makes agent sessions and sends them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.api.sessions import engine_name, session_hash
from tests.engines.aiperf import (
    AIPERF,
    MOONCAKE,
    TRACES,
    AiperfRun,
    as_traces,
    correlation_ids,
    profile,
    synthesize,
)
from tests.engines.harness import Engine, Ours, Router, all_up
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not AIPERF.exists() and "WARMROUTE_TEST_REQUIRE_SERVERS" not in os.environ,
    reason="no AIPerf here: run tests/engines/install_aiperf.sh",
)

MAX_WRONG = 1  # of some 24: on a starved machine events may come later than the next request


@contextmanager
def emulated(folder: Path) -> Iterator[Sequence[Ours]]:
    """Run two emulated replicas whose caches hold all that is sent."""
    replicas = []
    for name in ("emulated-1", "emulated-2"):
        port = free_port()
        words = [
            "loadtest.emulator", "--port", str(port), "--preset", "h100-8b",
            "--block-size", "32", "--num-gpu-blocks", "6000",
        ]  # fmt: skip
        replicas.append(Ours(name, f"http://127.0.0.1:{port}", words, folder / f"{name}.log"))
    with all_up(replicas):
        yield replicas


def send(
    replicas: Sequence[Engine | Ours], folder: Path, dataset: Path, format: Sequence[str], num: int
) -> tuple[AiperfRun, Router]:
    """Send whole sessions through a router that is given nothing but the replicas."""
    with Router(replicas, folder) as router:
        found = profile(folder, router.url, dataset, format, num)
    return found, router


def test_caches_with_room_hit_as_aiperf_says_they_can(tmp_path: Path) -> None:
    """Its own figure, of caches without a limit, counts whole blocks of 64 tokens."""
    dataset = as_traces(synthesize(tmp_path, 4, 5), tmp_path)

    with emulated(tmp_path) as replicas:
        found, _ = send(replicas, tmp_path, dataset, TRACES, 4)

    assert found.num_errors == 0
    assert found.num_requests > 30
    assert found.theoretical is not None
    assert found.theoretical > 0.8
    assert found.cached >= 0.97 * found.theoretical


def test_a_real_engine_answers_all_of_it(replicas: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Each session is known by AIPerf's name for it, and goes on in a cache that has it."""
    found, router = send(replicas, tmp_path, synthesize(tmp_path, 3, 5), MOONCAKE, 3)
    named = {engine_name(session_hash(each, "")) for each in correlation_ids(tmp_path)}
    records = router.decisions()

    assert found.num_errors == 0
    assert found.num_requests == len(records) > 20
    assert {record["session"] for record in records} == named
    assert len(named) == 3
    wrong = [
        r for r in records if r["num_reported_cached_tokens"] != r["num_predicted_cached_tokens"]
    ]
    assert len(wrong) <= MAX_WRONG
    assert found.cached > 0.85  # the sessions' first prompts are a tenth of all
