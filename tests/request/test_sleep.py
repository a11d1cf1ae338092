"""A replica that sleeps or is paused, among emulated ones that share an emulated pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import httpx
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from loadtest.engine_model.time_model import TimeModel
from policies.view import CandidateId
from router.replicas.replica import Ordered
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    Engines,
    Json,
    Reply,
    Stage,
    chat,
    num_running,
    on_stage,
    on_stages,
    streamed,
    together,
    words,
)
from tests.redis_servers import Start
from tests.request.pooled import ask, named, pooled

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}
R1 = CandidateId("r1")


async def order(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.post(url)).raise_for_status()


def is_asleep(stage: Stage) -> bool:
    return stage.router.fleet.members.replica("r1").asleep


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
    return stage.router.fleet.members.replica("r1").paused


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
        sleepers, now_s = stage.router.discovery.sleepers, monotonic()
        sleepers.ordered(Ordered("r1", "paused"), now_s)
        sleepers.note("r1", "awake", now_s - 1.0)
        assert is_paused(stage)
        sleepers.note("r1", "awake", now_s + 1.0)
        assert not is_paused(stage)


# -- requests without a first byte ---------------------------------------------------------------

HOURLY = {
    "health__interval_s": 0.02,
    "health__load_interval_s": 3600.0,
    "policy__name": "round_robin",
}
WAYS = ["sleep?level=0", "sleep?level=1", "pause?mode=keep", "pause?mode=keep&clear_cache=false"]
BODIES = [shape(chat(words(n))) for n in range(2) for shape in (streamed, streamed, dict, dict)]


@asynccontextmanager
async def unaware(
    number: int = 2, **engine: Any
) -> AsyncIterator[tuple[Stage, Sequence[Emulator]]]:
    """A router that has read its engines' metrics, and does not read them again by itself."""
    async with Engines(number, **engine) as engines, on_stage(*engines, **HOURLY) as stage:
        fleet = stage.router.fleet
        await stage.until(lambda: all(each.engine_load for each in fleet.load.status(monotonic())))
        yield stage, engines


def at_r1(stage: Stage, engines: Sequence[Emulator]) -> Emulator:
    url = stage.router.fleet.members.replica("r1").url
    return next(engine for engine in engines if engine.url == url)


@asynccontextmanager
async def waiting(
    stage: Stage, engines: Sequence[Emulator], way: str, bodies: Sequence[Json] = BODIES
) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Have half of some requests wait at r1, which has stopped, and the router does not know."""
    await order(f"{at_r1(stage, engines).url}/{way}")
    async with asyncio.TaskGroup() as tg:
        asked = [tg.create_task(stage.ask(body)) for body in bodies]
        await stage.until(lambda: sum(each.done() for each in asked) == len(bodies) // 2)
        assert stage.router.fleet.load.num_sent("r1") == len(bodies) // 2
        yield asked


def nobody_is_to_blame(stage: Stage) -> bool:
    return not any(status.reason for status in stage.router.fleet.load.status(monotonic()))


@pytest.mark.parametrize("way", WAYS)
async def test_requests_leave_a_replica_that_stops_to_compute(way: str) -> None:
    """When its pages show it: whole answers as well as streams."""
    async with (
        unaware() as (stage, engines),
        waiting(stage, engines, way) as asked,
    ):
        stage.router.discovery.sleepers.look("r1")
        replies = [await each for each in asked]

        assert [(reply.status, reply.replica) for reply in replies] == [(200, "r2")] * len(BODIES)
        moved = stage.metric("warmroute_failovers_total", replica="r1", reason="set_aside")
        assert moved == len(BODIES) // 2
        assert nobody_is_to_blame(stage)


@pytest.mark.parametrize(
    "order", [("sleep", {"level": 0}), ("sleep", {"level": 1}), ("pause", {"mode": "keep"})]
)
async def test_requests_leave_a_replica_that_is_ordered_to_stop(
    order: tuple[str, dict[str, Any]],
) -> None:
    """At once, although its metrics are read once an hour."""
    route, params = order
    async with (
        unaware() as (stage, engines),
        waiting(stage, engines, "pause?mode=keep") as asked,
    ):
        sent = {"route": route, "params": params, "replicas": ["r1"]}
        assert (await stage.admin("/admin/control", sent)).status == 200
        replies = [await each for each in asked]

        assert [(reply.status, reply.replica) for reply in replies] == [(200, "r2")] * len(BODIES)
        assert is_asleep(stage) == (route == "sleep")


async def test_requests_with_nowhere_to_go_wait_until_the_replica_goes_on() -> None:
    """A late answer is better than none."""
    async with unaware(1) as (stage, [engine]):
        await order(f"{engine.url}/pause")
        async with asyncio.TaskGroup() as tg:
            asked = tg.create_task(stage.ask(chat(words(1))))
            await stage.until(lambda: stage.router.fleet.load.num_sent("r1"))
            stage.router.discovery.sleepers.look("r1")
            await stage.until(lambda: is_paused(stage))
            await order(f"{engine.url}/resume")
            assert (await asked).status == 200
        assert stage.metric("warmroute_failovers_total") == 0


async def test_requests_leave_when_another_replica_is_back() -> None:
    """They had nowhere to go when theirs fell asleep."""
    async with unaware() as (stage, engines):
        await stage.admin("/admin/replicas/r2/drain", {"draining": True})
        await order(f"{at_r1(stage, engines).url}/sleep?level=0")
        async with asyncio.TaskGroup() as tg:
            asked = tg.create_task(stage.ask(chat(words(1))))
            await stage.until(lambda: stage.router.fleet.load.num_sent("r1"))
            stage.router.discovery.sleepers.look("r1")
            await stage.until(lambda: is_asleep(stage))
            await stage.admin("/admin/replicas/r2/drain", {"draining": False})
            assert (await asked).replica == "r2"


async def test_what_may_not_be_sent_twice_stays_at_a_replica_that_stops() -> None:
    """A response that the engine keeps."""
    go_on = asyncio.Event()

    async def waits(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({})

    pages = {"pause": {"status": "paused"}}
    async with FakeEngine(waits, **pages) as a, FakeEngine(waits, **pages) as b:
        async with on_stage(a, b, **HOURLY) as stage, asyncio.TaskGroup() as tg:
            body = {"model": "tiny", "background": True}
            asked = [tg.create_task(stage.ask(body, "/v1/responses")) for _ in range(2)]
            await stage.until(lambda: a.received and b.received)
            await stage.admin("/admin/control", {"route": "pause", "replicas": ["r1"]})
            assert is_paused(stage)
            await stage.admin("/admin/state")
            go_on.set()
            replies = [await each for each in asked]
            assert sorted(reply.replica for reply in replies) == ["r1", "r2"]
            assert stage.metric("warmroute_failovers_total") == 0


async def test_what_a_paused_replica_still_computes_is_awaited() -> None:
    """`mode=wait`: it takes nothing new, and answers what it has begun."""
    async with (
        unaware(time_model=TimeModel(base_ms=40.0)) as (stage, engines),
        asyncio.TaskGroup() as tg,
    ):
        bodies = [chat(words(number), max_tokens=40, ignore_eos=True) for number in range(2)]
        asked = [tg.create_task(stage.ask(body)) for body in bodies]
        await stage.until(lambda: all(map(num_running, engines)))
        await order(f"{at_r1(stage, engines).url}/pause?mode=wait")
        stage.router.discovery.sleepers.look("r1")
        await stage.until(lambda: is_paused(stage))
        replies = [await each for each in asked]

        assert {reply.replica for reply in replies} == {"r1", "r2"}
        assert stage.metric("warmroute_failovers_total") == 0


async def test_it_is_known_at_once_that_a_replica_was_ordered_to_wake_up() -> None:
    async with unaware(1) as (stage, _):
        for route, is_so in (("sleep", True), ("wake_up", False)):
            await stage.admin("/admin/control", {"route": route, "replicas": ["r1"]})
            await stage.until(lambda is_so=is_so: is_asleep(stage) == is_so)  # type: ignore[misc]


# -- several routers -----------------------------------------------------------------------------


async def test_an_order_at_one_router_is_known_to_all(start_redis: Start) -> None:
    """Pause and resume, with the loss of the cache; none of their probes shows it meanwhile."""
    rare = {"health__load_interval_s": 3600.0}
    async with (
        Engines(2) as engines,
        on_stages(*engines, redis=start_redis(), **rare) as (one, other),
    ):
        for number in range(4):
            await one.ask(chat(words(number)))
        await together([one, other], *engines)
        replica = one.router.fleet.members.replica("r1")
        theirs = next(
            each for each in other.router.fleet.members.replicas if each.url == replica.url
        ).name
        index, candidate = other.router.caches.index, CandidateId(theirs)
        assert index.num_blocks(candidate, "gpu") > 0

        sent = {"route": "pause", "replicas": ["r1"]}
        assert (await one.admin("/admin/control", sent)).status == 200
        await other.until(lambda: other.router.fleet.members.replica(theirs).paused)
        replies = [await other.ask(chat(words(number))) for number in range(4)]
        assert index.num_blocks(candidate, "gpu") == 0
        assert theirs not in {reply.replica for reply in replies}

        assert (await one.admin("/admin/control", sent | {"route": "resume"})).status == 200
        await other.until(lambda: not other.router.fleet.members.replica(theirs).paused)
