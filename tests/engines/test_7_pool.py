"""Two real replicas that share a real Mooncake pool: fetched, predicted, evicted, lost, found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.engines.vllm import BLOCK_BYTES, BLOCK_SIZE
from loadtest.results import TurnResult
from tests.engines.drive import drive
from tests.engines.harness import MASTER_READY_S, Engine, Master, Router, all_up, until, wait_until
from tests.engines.turns import (
    MIN_POOLED_RATIO,
    PROFILE,
    mixed_sessions,
    num_pooled,
    settled,
    take_turns,
    wrong_predictions,
)

PooledRouter = Callable[..., Router]


@pytest.fixture(scope="module")
def master(log_dir: Path) -> Iterator[Master]:
    """A master that evicts from 800 blocks on: less than the sessions of a test fill."""
    running = Master(log_dir, watermark=0.4)
    with all_up([running], timeout_s=MASTER_READY_S):
        yield running


@pytest.fixture(scope="module")
def pooled(master: Master, log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two replicas with small caches of their own."""
    engines = (master.engine("p1", log_dir), master.engine("p2", log_dir))
    with all_up(engines):
        yield engines


@pytest.fixture
def start_pooled(master: Master, pooled: tuple[Engine, Engine], log_dir: Path) -> PooledRouter:
    """Make a router for both, that knows the pool."""

    def start(**options: Any) -> Router:
        return Router(pooled, log_dir, options=master.options, **options)

    return start


async def test_a_session_goes_on_where_its_cache_is_not(
    start_pooled: PooledRouter, master: Master
) -> None:
    """Its replica drains; the other one has never seen it, and fetches what the pool has."""
    with start_pooled() as router:
        session = make_sessions(replace(PROFILE, num_sessions=1, seed=71))[0]
        (_, first), (_, second) = await take_turns(router.url, [session], max_rounds=2)
        assert second.replica == first.replica
        assert first.replica is not None
        assert second.num_prompt_tokens is not None
        num_blocks = second.num_prompt_tokens // 32  # stored behind the answer's back
        wait_until(lambda: len(master.keys()) >= num_blocks, 60, "the turn's blocks in the pool")
        wait_until(router.knows_pool, 60, "the pool's layout")
        router.drain(first.replica)
        ((_, third),) = await take_turns(router.url, [session], max_rounds=1)

    assert third.replica != first.replica
    assert third.predicted is not None
    assert third.predicted.pool > 0
    assert third.predicted.total == third.num_cached_tokens
    assert third.num_cached_tokens is not None
    assert third.num_cached_tokens >= second.num_prompt_tokens // 32 * 32


async def test_predictions_hold_while_the_pool_evicts(
    start_pooled: PooledRouter, master: Master
) -> None:
    """Sessions that are thrown to and fro between replicas, through a pool that is too small."""
    num_evicted = master.metric("master_evicted_key_count")
    with start_pooled(policy="random") as router:
        turns = await take_turns(router.url, mixed_sessions(num_turns=6, num_sessions=5))
        results = [result for _, result in turns]
        wrong = wrong_predictions(results)

        assert len(results) >= 50
        assert num_pooled(results) >= 10, "hardly anything was fetched: nothing was proved"
        assert master.metric("master_evicted_key_count") > num_evicted + 200
        assert len(wrong) <= (1 - MIN_POOLED_RATIO) * len(results), "\n".join(wrong)
        for replica in ("r1", "r2"):
            assert router.state(replica) == "exact"
        num_bytes = router.metric("warmroute_pool_bytes_per_token", model="tiny")
        assert num_bytes == BLOCK_BYTES / BLOCK_SIZE


async def test_predictions_hold_under_load(start_pooled: PooledRouter) -> None:
    """Among sessions that run at once, the settled requests are predicted."""
    with start_pooled(policy="random") as router:
        first = make_sessions(replace(PROFILE, num_sessions=1, seed=75))
        await take_turns(router.url, first, max_rounds=2)
        wait_until(router.knows_pool, 60, "the pool's layout")
        sessions = mixed_sessions(num_turns=5, num_sessions=5, scale_time=0.1)
        results = await drive(router.url, sessions, concurrency=3)
        chosen = settled(results)
        wrong = wrong_predictions(chosen)

    assert [result.error for result in results if result.error is not None] == []
    assert num_pooled(chosen) >= 3
    assert len(wrong) <= max(1, (1 - MIN_POOLED_RATIO) * len(chosen)), "\n".join(wrong)


async def test_a_late_router_knows_the_pool(start_pooled: PooledRouter, master: Master) -> None:
    """What was pooled before it joined is listed, and found by the names of its first prompt."""
    with start_pooled() as router:
        session = make_sessions(replace(PROFILE, num_sessions=1, seed=72))[0]
        await take_turns(router.url, [session], max_rounds=2)
    turn = session.next_turn()
    assert turn is not None
    with start_pooled() as late:
        wait_until(lambda: late.metric("warmroute_pool_blocks") > 0, 60, "the pool's keys")
        body = turn.body
        wait_until(lambda: late.explain(body)["num_pool_tokens"] > 0, 60, "the session's blocks")

    assert late is not router


async def test_an_engine_that_is_paused_empties_the_pool(
    start_pooled: PooledRouter, master: Master, pooled: tuple[Engine, Engine]
) -> None:
    """Everybody's: the router sees it. That its own cache went, too, its next step says."""
    with start_pooled() as router:
        session = make_sessions(replace(PROFILE, num_sessions=1, seed=73))[0]
        await take_turns(router.url, [session], max_rounds=2)
        wait_until(lambda: router.metric("warmroute_pool_blocks", model="tiny") > 0, 60, "blocks")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for route in ("pause", "resume"):
                (await client.post(f"{pooled[0].url}/{route}")).raise_for_status()
        left = len(master.keys())
        wait_until(
            lambda: router.metric("warmroute_pool_knowledge_total", kind="emptied") == 1,
            60,
            "the pool's end in the router",
        )
        (_, third), (_, fourth) = await take_turns(router.url, [session], max_rounds=2)

    assert left == 0
    assert third.predicted is not None
    assert third.predicted.pool == 0
    assert fourth.predicted is not None
    assert fourth.predicted.total == fourth.num_cached_tokens


async def test_what_the_pool_lost_is_named(
    start_pooled: PooledRouter, pooled: tuple[Engine, Engine]
) -> None:
    """The engine that had a session is paused, which empties its cache and the pool."""
    with start_pooled() as router:
        session = make_sessions(replace(PROFILE, num_sessions=1, seed=74))[0]
        taken = await take_turns(router.url, [session], max_rounds=2)
        body, home = taken[-1][0].body, taken[-1][1].replica
        wait_until(lambda: router.explain(body)["num_pool_tokens"] > 1_000, 60, "pooled blocks")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for route in ("pause", "resume"):
                url = pooled[0 if home == "r1" else 1].url
                (await client.post(f"{url}/{route}")).raise_for_status()
            wait_until(lambda: router.metric("warmroute_pool_blocks") == 0, 60, "an empty pool")
            await take_turns(router.url, [session], max_rounds=1)
            found = (await client.get(f"{router.admin_url}/admin/sessions")).json()["sessions"]
            (listed,) = found
            turns_url = f"{router.admin_url}/admin/sessions/{listed['session']}"
            await until(lambda: len(httpx.get(turns_url).json()["turns_shown"]) == 3)
            turn = (await client.get(turns_url)).json()["turns_shown"][-1]

    causes = turn["computed"]["tokens"]
    assert sum(causes.values()) == turn["num_tokens"] - turn["num_cached"]
    assert causes["pool_lost"] > 1_000
    assert set(causes) <= {"pool_lost", "last_block", "new"}


async def test_the_master_dies_and_comes_back(start_pooled: PooledRouter, master: Master) -> None:
    """During load: no request fails, the router says so, and counts on the pool again later."""
    with start_pooled() as router:
        results: list[TurnResult] = []
        sessions = mixed_sessions(num_turns=6, num_sessions=4, scale_time=0.2)

        async def fail() -> None:
            await until(lambda: len(results) >= 8)
            await asyncio.to_thread(master.kill)
            await until(lambda: router.metric("warmroute_pool_up") == 0)
            await until(lambda: len(results) >= 16)
            master.start()
            await asyncio.to_thread(master.wait_ready, "/health", MASTER_READY_S)

        async with asyncio.TaskGroup() as tg:
            tg.create_task(fail())
            await drive(router.url, sessions, concurrency=3, on_result=results.append)
        await until(lambda: router.metric("warmroute_pool_up") == 1)

        assert [r.error_message for r in results if r.error is not None] == []
        assert len(results) >= 30
        assert router.metric("warmroute_pool_failures_total", code="pool_gone") > 0
        log = router.log_path.read_text()
        assert "pool lost" in log
        assert log.count("pool found") == 2
