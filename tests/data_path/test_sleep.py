"""A replica that sleeps, among emulated ones that share an emulated pool."""

from __future__ import annotations

import httpx

from policies.view import CandidateId
from tests.data_path.test_pool import ask, named, pooled
from tests.faults.stage import Stage, words

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}
R1 = CandidateId("r1")


async def order(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.post(url)).raise_for_status()


def is_asleep(stage: Stage) -> bool:
    return stage.router.fleet.replica("r1").asleep


async def test_a_replica_that_sleeps_is_left_out_and_empties_the_pool() -> None:
    """It loses its cache, and everybody the pool; awake it is sent requests, and held for empty."""
    async with pooled(**QUICK) as (stage, master, engines):
        one, _ = engines
        for number in range(2):
            await ask(stage, engines, words(number))
        await named(stage)
        await stage.until(lambda: len(stage.router.pool.directory("tiny")) == len(master.pool))
        assert stage.router.caches.index.num_blocks(R1, "gpu") > 0
        await order(f"{one.url}/sleep?level=1")
        await stage.until(lambda: is_asleep(stage))
        await stage.until(lambda: not len(stage.router.pool.directory("tiny")))

        assert stage.router.caches.index.num_blocks(R1, "gpu") == 0
        assert stage.router.pool.counters.num_emptied == 1
        assert "the Mooncake pool was emptied" in stage.log
        assert "replica sleeps: it gets no requests; it lost its cache" in stage.log
        again = [await ask(stage, engines, words(number)) for number in range(2)]
        assert [reply.replica for reply in again] == ["r2"] * 2
        assert all(reply.predicted == reply.reported for reply in again)

        await order(f"{one.url}/wake_up")
        await stage.until(lambda: not is_asleep(stage))
        replies = [await ask(stage, engines, words(number)) for number in range(10, 12)]
        assert {reply.replica for reply in replies} == {"r1", "r2"}
        assert all(reply.predicted == reply.reported for reply in replies)
        assert "replica awake again" in stage.log


async def test_a_router_that_comes_while_a_replica_sleeps_does_not_believe_its_history() -> None:
    """Its events say what it held before; that it was lost, its first step after waking says."""
    async with pooled(**QUICK) as (stage, _, engines):
        one, _ = engines
        await ask(stage, engines, words(1))
        held = stage.router.caches.index.num_blocks(R1, "gpu")
        await order(f"{one.url}/sleep?level=1")
        await stage.until(lambda: is_asleep(stage))
        stream = stage.router.caches.stream(R1)
        assert stream is not None
        num_clears = stream.counters.num_clears
        stream.resync()
        await stage.until(lambda: stage.router.caches.index.num_blocks(R1, "gpu") == held)
        await order(f"{one.url}/wake_up")
        await stage.until(lambda: not is_asleep(stage))

        assert stream.counters.num_clears == num_clears
        assert stage.router.caches.index.num_blocks(R1, "gpu") == 0


async def test_a_nap_keeps_the_cache() -> None:
    """Level 0 only stops the scheduler: no requests, and nothing is lost."""
    async with pooled(**QUICK) as (stage, master, engines):
        one, _ = engines
        await ask(stage, engines, words(1))
        held = stage.router.caches.index.num_blocks(R1, "gpu")
        await order(f"{one.url}/sleep?level=0")
        await stage.until(lambda: is_asleep(stage))
        await order(f"{one.url}/wake_up")
        await stage.until(lambda: not is_asleep(stage))

        assert stage.router.caches.index.num_blocks(R1, "gpu") == held > 0
        assert len(master.pool) > 0
