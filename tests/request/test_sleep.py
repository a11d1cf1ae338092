"""A replica that sleeps or is paused, among emulated ones that share an emulated pool."""

from __future__ import annotations

from time import monotonic

import httpx

from policies.view import CandidateId
from tests.faults.stage import Engines, Stage, chat, on_stage, words
from tests.request.pooled import ask, named, pooled

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
        await stage.until(lambda: len(stage.pool.directory("tiny")) == len(master.pool))
        assert stage.router.caches.index.num_blocks(R1, "gpu") > 0
        await order(f"{one.url}/sleep?level=1")
        await stage.until(lambda: is_asleep(stage))
        await stage.until(lambda: not len(stage.pool.directory("tiny")))

        assert stage.router.caches.index.num_blocks(R1, "gpu") == 0
        assert stage.pool.counters.num_emptied == 1
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
        num_clears = stream.counters.blocks.num_clears
        stream.resync()
        await stage.until(lambda: stage.router.caches.index.num_blocks(R1, "gpu") == held)
        await order(f"{one.url}/wake_up")
        await stage.until(lambda: not is_asleep(stage))

        assert stream.counters.blocks.num_clears == num_clears
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


def is_paused(stage: Stage) -> bool:
    return stage.router.fleet.replica("r1").paused


async def test_a_replica_that_is_paused_gets_no_requests_until_it_goes_on() -> None:
    """Its cache may be kept: what it holds is credited again."""
    async with pooled(**QUICK) as (stage, _, engines):
        one, _ = engines
        await ask(stage, engines, words(1))
        await named(stage)
        held = stage.router.caches.index.num_blocks(R1, "gpu")
        await order(f"{one.url}/pause?mode=keep&clear_cache=false")
        await stage.until(lambda: is_paused(stage))

        assert "replica is paused: it gets no requests" in stage.log
        replies = [await ask(stage, engines, words(number)) for number in range(10, 13)]
        assert {reply.replica for reply in replies} == {"r2"}
        assert not is_asleep(stage)
        withheld = "warmroute_replica_withheld"
        assert stage.metric(withheld, replica="r1", why="paused") == 1
        assert stage.metric(withheld, replica="r1", why="asleep") == 0
        assert stage.metric(withheld, replica="r2", why="paused") == 0
        described = (await stage.admin("/admin/replicas")).json()["replicas"]
        assert [each["replica"]["paused"] for each in described] == [True, False]

        await order(f"{one.url}/resume")
        await stage.until(lambda: not is_paused(stage))
        assert "replica resumed" in stage.log
        assert stage.router.caches.index.num_blocks(R1, "gpu") == held > 0
        replies = [await ask(stage, engines, words(1)) for _ in range(2)]
        assert {reply.replica for reply in replies} == {"r1", "r2"}
        assert all(reply.predicted == reply.reported > 0 for reply in replies)


async def test_a_pause_by_the_admin_port_is_known_at_once() -> None:
    """Before a probe could show it; and that the cache is gone, which none shows."""
    rare = {"health__load_interval_s": 3600.0}
    async with pooled(**QUICK | rare) as (stage, _, engines):
        await ask(stage, engines, words(1))
        await named(stage)
        assert stage.router.caches.index.num_blocks(R1, "gpu") > 0
        sent = {"route": "pause", "replicas": ["r1"]}
        assert (await stage.admin("/admin/control", sent)).status == 200

        assert is_paused(stage)
        assert stage.router.caches.index.num_blocks(R1, "gpu") == 0
        assert (await ask(stage, engines, words(1))).replica == "r2"

        assert (await stage.admin("/admin/control", sent | {"route": "resume"})).status == 200
        assert not is_paused(stage)
        replies = [await ask(stage, engines, words(1)) for _ in range(2)]
        assert {reply.replica for reply in replies} == {"r1", "r2"}
        assert all(reply.predicted == reply.reported for reply in replies)

        keeping = sent | {"params": {"clear_cache": False, "mode": "keep"}}
        assert (await stage.admin("/admin/control", keeping)).status == 200
        assert is_paused(stage)
        assert stage.router.caches.index.num_blocks(R1, "gpu") > 0


async def test_a_replica_that_refuses_to_pause_is_not_paused() -> None:
    """Nor does /resume wake up one that sleeps."""
    async with pooled(**QUICK) as (stage, _, engines):
        one, _ = engines
        sent = {"route": "pause", "params": {"mode": "never"}, "replicas": ["r1"]}
        answered = (await stage.admin("/admin/control", sent)).json()["replicas"]
        assert [each["status"] for each in answered] == [400]
        assert not is_paused(stage)
        await order(f"{one.url}/sleep?level=1")
        await stage.until(lambda: is_asleep(stage))
        await stage.admin("/admin/control", {"route": "resume", "replicas": ["r1"]})
        assert is_asleep(stage)


async def test_a_replica_found_paused_gets_no_requests() -> None:
    """What it says when it is found counts."""
    async with Engines(2) as engines:
        await order(f"{engines[0].url}/pause")
        async with on_stage(*engines, health__load_interval_s=3600.0) as stage:
            assert is_paused(stage)
            assert (await stage.ask(chat(words(1)))).replica == "r2"


async def test_what_was_read_before_an_order_does_not_undo_it() -> None:
    """A page that was asked for before a pause is older than the pause."""
    async with Engines(1) as engines, on_stage(*engines, health__load_interval_s=3600.0) as stage:
        sleepers, now_s = stage.router.sleepers, monotonic()
        sleepers.ordered("r1", "paused", now_s)
        sleepers.note("r1", "awake", now_s - 1.0)
        assert is_paused(stage)
        sleepers.note("r1", "awake", now_s + 1.0)
        assert not is_paused(stage)
