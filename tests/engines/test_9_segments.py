"""An engine dies with a part of the pool in it, behind two routers that share Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from tests.engines.harness import MASTER_READY_S, ROUTER_READY_S, Engine, Master, Router, all_up
from tests.engines.load import Load, failures
from tests.engines.turns import PROFILE
from tests.ports import free_port
from tests.redis_servers import RedisServer, binary


@pytest.fixture(params=["fail", "recompute"])
def engines(
    request: pytest.FixtureRequest, log_dir: Path
) -> Iterator[tuple[Master, tuple[Engine, Engine]]]:
    """Two replicas that give the pool its memory, and what they do where an object is gone."""
    master = Master(log_dir)
    with all_up([master], timeout_s=MASTER_READY_S):
        both = [
            master.engine(f"{request.param}{i}", log_dir, load_failure_policy=request.param)
            for i in (1, 2)
        ]
        with all_up(both):
            yield master, (both[0], both[1])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    running = RedisServer(binary("7"), tmp_path)
    yield running.start(free_port())
    running.stop()


@pytest.mark.timeout(300)
async def test_an_engine_dies_with_its_segment_of_the_pool(
    engines: tuple[Master, tuple[Engine, Engine]], redis: RedisServer, log_dir: Path
) -> None:
    """Half of what is in the pool is gone; the master does not know: no client sees an error."""
    master, both = engines
    flags = ("--redis", redis.url, *master.options)
    routers = [Router(both, log_dir, options=flags, policy="random") for _ in range(2)]
    with all_up(routers, "/readyz", ROUTER_READY_S):
        load = Load(routers)
        profile = replace(PROFILE, num_sessions=100, seed=91, num_output_tokens=40)
        async with asyncio.TaskGroup() as tg:
            sessions = make_sessions(replace(profile, scale_time=0.01))
            tg.create_task(load.run(sessions, concurrency=6))
            await load.more(24)
            load.killed_replica = "r2"  # a stream that it had begun breaks off: see `Load`
            await asyncio.to_thread(both[1].kill)
            await load.more(50)
            load.stop()
        moved = sum(router.metric("warmroute_failovers_total") for router in routers)
        for name in ("first_event_errors", "pool_skipped", "failures_absolved", "not_retried"):
            print(name, sum(router.metric(f"warmroute_{name}_total") for router in routers))

    assert failures(load.results) == []
    assert moved + load.num_broken_off > 0, "nothing was to be saved"
    assert len(load.results) >= 74
