"""Data-parallel ranks of one group behind several ports, on real engines.

External load balancing: a port for each rank. Hybrid: a port for the ranks of each machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.engines.ports import free_port
from loadtest.engines.vllm import TOOL_OPTIONS
from tests.engines.harness import Engine, Router, all_up, wait_until
from tests.engines.hybrid_models import make_model
from tests.engines.turns import PROFILE, take_turns, wrong_predictions
from tests.ports import ports_in_a_row

MAX_WRONG = 2  # of twelve: on a starved machine events may come later than the next request


def group(log_dir: Path, name: str, *options: str) -> tuple[str, ...]:
    """Make the command line of a group's servers, whose model has experts."""
    num_ranks = int(options[options.index("--data-parallel-size") + 1])
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports_in_a_row(num_ranks)}",  # rank 1's is the next one
        "replay_endpoint": f"tcp://*:{ports_in_a_row(num_ranks)}",
    }
    return (
        *TOOL_OPTIONS, "--model", str(make_model("experts", log_dir / name)), *options,
        "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()),
        "--kv-events-config", json.dumps(events),
    )  # fmt: skip


@pytest.fixture
def ranks(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two servers: each is a rank of the same group."""
    options = group(log_dir, "external", "--data-parallel-external-lb", "--data-parallel-size", "2")
    engines = (
        Engine("external-0", log_dir, options=(*options, "--data-parallel-rank", "0")),
        Engine("external-1", log_dir, options=(*options, "--data-parallel-rank", "1")),
    )
    with all_up(engines):
        yield engines


@pytest.fixture
def machines(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two servers, as of two machines: each has two ranks of the same group."""
    options = group(
        log_dir, "hybrid", "--data-parallel-hybrid-lb", "--data-parallel-size", "4",
        "--data-parallel-size-local", "2",
    )  # fmt: skip
    engines = (
        Engine("hybrid-0", log_dir, options=(*options, "--data-parallel-start-rank", "0")),
        Engine("hybrid-2", log_dir, options=(*options, "--data-parallel-start-rank", "2")),
    )
    with all_up(engines):
        yield engines


def numbers(engine: Engine) -> list[str]:
    """List the ranks whose events a server names, in whatever order they came up there."""
    return sorted(httpx.get(f"{engine.url}/kv_event_sources", timeout=30).json())


@pytest.mark.timeout(600)
async def test_each_port_is_a_replica(ranks: tuple[Engine, Engine], log_dir: Path) -> None:
    """Rank 1 calls itself so in metrics and event sources, and gets no header: predicted as is."""
    with Router(ranks, log_dir, policy="round_robin") as router:
        wait_until(lambda: all(router.state(each) for each in ("r1", "r2")), 30, "their events")
        sessions = make_sessions(replace(PROFILE, num_sessions=4, seed=76))
        turns = [each for _, each in await take_turns(router.url, sessions, max_rounds=3)]
        states = [router.state(each) for each in ("r1", "r2")]

    assert [numbers(each) for each in ranks] == [["0"], ["1"]]
    assert {each.replica for each in turns} == {"r1", "r2"}
    assert states == ["exact", "exact"]
    wrong = wrong_predictions(turns)
    assert len(wrong) <= MAX_WRONG, "\n".join(wrong)
    assert sum(each.num_cached_tokens or 0 for each in turns) > 5_000


@pytest.mark.timeout(600)
async def test_each_machine_is_a_replica_with_its_ranks(
    machines: tuple[Engine, Engine], log_dir: Path
) -> None:
    """Metrics and event sources number ranks in the group, the header on their own machine."""
    with Router(machines, log_dir, policy="round_robin") as router:
        names = [f"r{machine}#{rank}" for machine in (1, 2) for rank in (0, 1)]
        wait_until(lambda: all(router.state(each) for each in names), 30, "their events")
        sessions = make_sessions(replace(PROFILE, num_sessions=4, seed=77))
        turns = [each for _, each in await take_turns(router.url, sessions, max_rounds=4)]
        states = [router.state(each) for each in names]

    assert [numbers(each) for each in machines] == [["0", "1"], ["2", "3"]]
    assert {each.replica for each in turns} == set(names)
    assert states == ["exact"] * 4
    wrong = wrong_predictions(turns)
    assert len(wrong) <= MAX_WRONG, "\n".join(wrong)
    assert sum(each.num_cached_tokens or 0 for each in turns) > 5_000
