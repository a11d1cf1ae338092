"""The study of large fleets, on a fleet of two and a handful of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.bench_redis import redis_server
from loadtest.studies.scale import Setting, measure, report
from loadtest.studies.scale_costs import Cost, Held, Use

SMALL = Setting(num_sessions=2, num_turns=1, scale_tokens=0.05, idle_s=0.1)


def test_cost_is_what_the_load_adds() -> None:
    """What a process uses idle is not counted to the load."""
    uses = (Use(10.0, 100), Use(11.0, 110), Use(16.0, 150))

    cost = Cost.between(uses, idle_s=10.0, loaded_s=20.0)

    assert cost.idle_cpu == pytest.approx(0.1)
    assert cost.loaded_cpu_s == pytest.approx(3.0)
    assert (cost.idle_bytes, cost.loaded_bytes) == (110, 150)


def test_what_redis_holds_is_told_apart(tmp_path: Path) -> None:
    """Blocks, sessions and logs are counted by key, whatever bytes a bucket's key ends with."""
    with redis_server(tmp_path) as store:
        store.hset(b"{wr:warmroute}:b:\xdb\xff", mapping={b"\x01": b"a", b"\x02": b"b"})
        store.hset("{wr:warmroute}:sessions", mapping={"one": "state"})
        store.xadd("{wr:warmroute}:log", {"d": "x" * 1000})
        store.set("{wr:warmroute}:sweeper", "x" * 10_000)

        held = Held.by(store)

    assert (held.num_blocks, held.num_sessions) == (2, 1)
    assert 0 < held.block_bytes < 1000
    assert 0 < held.session_bytes < 1000
    assert 1000 < held.log_bytes < 10_000


@pytest.mark.usefixtures("forked_children")
async def test_fleet_routers_and_redis_are_measured() -> None:
    """Two replicas, two routers, one Redis: requests succeed, and every table has its row."""
    found = await measure(2, SMALL)
    text = report([found], SMALL)

    assert found.turns
    assert all(turn.error is None for turn in found.turns)
    assert len(found.routers) == 2
    assert found.held is not None
    assert found.held.num_blocks > 0
    assert found.held.num_sessions > 0
    assert sum(line.startswith("| 2 |") for line in text.splitlines()) == 3
