"""Two data-parallel ranks with a port each (external load balancing), on real engines."""

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
from tests.engines.test_5_ranks import two_ports
from tests.engines.turns import PROFILE, take_turns, wrong_predictions

MAX_WRONG = 2  # of twelve: on a starved machine events may come later than the next request


@pytest.fixture(scope="module")
def ranks(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """One model of experts, two servers: each is a rank of the same group."""
    model = str(make_model("experts", log_dir / "experts"))
    rpc_port = free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{two_ports()}",  # rank 1's is the next one
        "replay_endpoint": f"tcp://*:{two_ports()}",
    }
    group = (
        *TOOL_OPTIONS, "--model", model, "--data-parallel-external-lb",
        "--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", str(rpc_port),
        "--kv-events-config", json.dumps(events),
    )  # fmt: skip
    engines = (
        Engine("external-0", log_dir, options=(*group, "--data-parallel-rank", "0")),
        Engine("external-1", log_dir, options=(*group, "--data-parallel-rank", "1")),
    )
    with all_up(engines):
        yield engines


def numbers(engine: Engine) -> list[str]:
    """List the ranks whose events a server names."""
    return list(httpx.get(f"{engine.url}/kv_event_sources", timeout=30).json())


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
