"""router.discovery.watches in a whole router: replicas that come and go while it serves.

Ranks that come and go while a replica runs: vLLM's elastic scaling.

Another engine at the same address: nothing of the old one counts for it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from router.base.messages import ReplicaRecord
from router.discovery import watches
from router.discovery.engine_facts import EngineFacts
from router.discovery.watches import ReplicaWatch
from router.observers.live.degraded import degraded
from router.replicas.replica import Replica, candidates_of
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    SLOW,
    STUCK,
    Engines,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    streamed,
    words,
)
from tests.ports import free_port

EMPTY = {"admin__allow_empty": True, "ready": False}


async def add(stage: Stage, engine: Emulator, **fields: object) -> str:
    reply = await stage.admin("/admin/replicas", {"url": engine.url, **fields})
    assert reply.status == 201, reply.body
    name: str = reply.json()["name"]
    return name


async def remove(stage: Stage, name: str, query: str = "") -> None:
    reply = await stage.admin(f"/admin/replicas/{name}{query}", method="DELETE")
    assert (reply.status, reply.json()) == (202, {"name": name, "leaving": True})


def nothing_of(stage: Stage, name: str) -> bool:
    """Return whether a replica has left nothing behind."""
    router = stage.router
    return (
        name not in [replica.name for replica in router.fleet.members.replicas]
        and router.registry.find(name) is None
        and router.caches.stream(name) is None  # type: ignore[arg-type]
        and not router.caches.index.epoch(name)  # type: ignore[arg-type]
        and name not in router.waiting
        and not any(task.get_name().endswith(f" {name}") for task in asyncio.all_tasks())
    )


async def test_a_router_that_starts_empty_is_given_replicas() -> None:
    async with Engines(1) as (engine,), on_stage(**EMPTY) as stage:
        ready = await stage.ask(None, "/readyz", method="GET")
        refused = await stage.ask(chat(words(1)))
        assert await add(stage, engine) == "r1"
        await stage.ready()
        served = await stage.ask(chat(words(1)))
        await stage.settled(engine)

        assert (ready.status, ready.body) == (503, b"no replica\n")
        assert refused.status == 503
        assert (served.status, stage.state("r1")) == (200, "exact")


async def test_a_watch_that_fails_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    register = ReplicaWatch._register
    broken = {"r1"}

    def fail(self: ReplicaWatch, facts: EngineFacts, key_head: str | None) -> Replica:
        if self._name in broken:
            broken.clear()
            raise RecursionError
        return register(self, facts, key_head)

    monkeypatch.setattr(ReplicaWatch, "_register", fail)
    async with Engines(2) as engines, on_stage(*engines, ready=False) as stage:
        await stage.until(
            lambda: stage.metric("warmroute_follower_failures_total", follower="replica") == 1
        )
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        await stage.ready()

        assert (await stage.ask(chat(words(1)))).status == 200
        assert "r1" not in stage.router.waiting
        assert "task failed: it is restarted follower=replica replica=r1" in stage.log


async def test_an_added_replica_takes_its_share() -> None:
    async with Engines(2) as engines, on_stage(engines[0], policy__name="round_robin") as stage:
        assert await add(stage, engines[1], name="east") == "east"
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        await stage.ready()
        replies = [await stage.ask(chat(words(number))) for number in range(4)]

        assert {reply.replica for reply in replies} == {"r1", "east"}
        shown = (await stage.admin("/admin/replicas")).json()["replicas"]
        assert [(each["name"], each["leaving"]) for each in shown] == [
            ("r1", False),
            ("east", False),
        ]


async def test_a_removed_replica_finishes_its_answers() -> None:
    async with Engines(2, time_model=SLOW) as engines, on_stage(*engines) as stage:
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        body = streamed(chat(words(1), max_tokens=100, ignore_eos=True))
        async with stage.asking(body) as answer:
            name = answer.headers["x-warmroute-replica"]
            await remove(stage, name)
            shown = (await stage.admin("/admin/replicas")).json()["replicas"]
            elsewhere = await stage.ask(chat(words(1), max_tokens=1))
            assert b"[DONE]" in await answer.content.read()
        await stage.until(lambda: nothing_of(stage, name))

        assert [each["leaving"] for each in shown].count(True) == 1
        assert elsewhere.replica != name
        assert (await stage.admin(f"/admin/replicas/{name}", method="DELETE")).status == 404
        assert "replica removed" in stage.log


async def test_removing_now_waits_for_no_answer() -> None:
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines) as stage:
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        async with stage.hanging_up(streamed(chat(words(1)))):
            await stage.until(lambda: any(map(num_running, engines)))
            first, other = engines if num_running(engines[0]) else reversed(engines)
            name = next(r.name for r in stage.router.fleet.members.replicas if r.url == first.url)
            await remove(stage, name, "?now=1")
            await stage.until(lambda: num_running(other))
            await stage.until(lambda: nothing_of(stage, name))
            assert stage.metric("warmroute_failovers_total", replica=name) == 1


async def test_a_removed_replica_may_come_back() -> None:
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await stage.ask(chat(words(1)))
        for _ in range(3):
            await remove(stage, "r1")
            assert await add(stage, engine) == "r1"
            await stage.ready()
            await stage.settled(engine)
        reply = await stage.ask(chat(words(1)))

        assert reply.predicted == reply.reported > 0
        assert stage.state("r1") == "exact"


async def test_adding_back_stops_the_leaving() -> None:
    async with Engines(1, time_model=SLOW) as (engine,), on_stage(engine) as stage:
        body = streamed(chat(words(1), max_tokens=100, ignore_eos=True))
        async with stage.asking(body) as answer:
            await remove(stage, "r1")
            assert await add(stage, engine) == "r1"
            assert stage.router.discovery.watches.is_offered("r1")
            assert b"[DONE]" in await answer.content.read()

        assert (await stage.ask(chat(words(1), max_tokens=1))).status == 200
        assert "replica removed" not in stage.log


async def test_a_replica_not_discovered_yet_can_be_removed() -> None:
    async with Engines(1) as engines, on_stage("http://127.0.0.1:9", *engines) as stage:
        await stage.until(lambda: "replica not usable yet" in stage.log)
        await remove(stage, "r1")
        await stage.until(lambda: nothing_of(stage, "r1"))

        assert (await stage.ask(chat(words(1)))).replica == "r2"


async def test_removed_before_it_was_ever_watched() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        watches = stage.router.discovery.watches
        for _ in range(3):
            watches.apply({"east": ReplicaRecord(url="http://127.0.0.1:9")})
            watches.apply({"east": ReplicaRecord(url="http://127.0.0.1:9", removed=True)})
        await stage.until(lambda: nothing_of(stage, "east"))


async def test_the_last_replica_can_be_removed() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await remove(stage, "r1")
        await stage.until(lambda: nothing_of(stage, "r1"))
        ready = await stage.ask(None, "/readyz", method="GET")

        assert (await stage.ask(chat(words(1)))).status == 503
        assert (ready.status, ready.body) == (503, b"no replica\n")


async def test_a_replica_that_moves_is_found_at_its_new_address() -> None:
    async with Engines(2) as (old, new), on_stage(**EMPTY) as stage:
        watches = stage.router.discovery.watches
        watches.apply({"east": ReplicaRecord(url=old.url)})
        await stage.ready()
        await stage.ask(chat(words(1)))
        await stage.settled(old)
        watches.apply({"east": ReplicaRecord(url=new.url)})
        await stage.until(lambda: [r.url for r in stage.router.fleet.members.replicas] == [new.url])
        await stage.ready()
        reply = await stage.ask(chat(words(1)))

        assert (reply.replica, reply.predicted, reply.reported) == ("east", 0, 0)


async def test_records_of_no_replica_are_logged_once() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for _ in range(2):
            stage.router.discovery.watches.apply({"a b": ReplicaRecord(url="http://127.0.0.1:9")})

        assert stage.log.count("record of a replica is ignored") == 2  # in two log forms
        assert len(stage.router.registry.entries) == 1


async def test_a_replica_drained_before_discovery_stays_drained() -> None:
    quick = {"health__interval_s": 0.05, "health__timeout_s": 0.5}
    async with Engines(2) as engines, on_stage(**EMPTY, **quick) as stage:
        for engine in engines:
            name = await add(stage, engine)
            if engine is engines[0]:
                await stage.admin(f"/admin/replicas/{name}/drain", {"draining": True})
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        await stage.ready()
        assert (await stage.ask(chat(words(1)))).replica == "r2"

        arm(engines[0], "restart", down_s=0.2)
        await stage.until(lambda: "replica restarted" in stage.log)
        await stage.until(lambda: stage.log.count("replica found") == 6)  # in two log forms
        assert (await stage.ask(chat(words(2)))).replica == "r2"


async def test_readiness_does_not_wait_for_a_removed_ones_tokenizer() -> None:
    async with Engines(2) as (first, second), on_stage(**EMPTY) as stage:
        await add(stage, first)
        await stage.until(lambda: stage.router.fleet.members.replicas)
        await remove(stage, "r1", "?now=1")
        await add(stage, second)
        await stage.ready()
        await stage.until(lambda: stage.router.prompters.get("tiny") is not None)

        assert (await stage.ask(chat(words(1)))).status == 200


async def test_replicas_that_went_long_ago_are_not_shown_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "MAX_GONE", 1)
    async with Engines(1) as (engine,), on_stage(**EMPTY) as stage:

        def shown(name: str) -> bool:
            return stage.metric("warmroute_requests_total", replica=name) > 0

        for name in ("pod-a", "pod-b", "pod-a", "pod-c"):
            await add(stage, engine, name=name)
            await stage.ready()
            assert (await stage.ask(chat(words(1)))).replica == name
            assert shown(name)
            await remove(stage, name)
            await stage.until(lambda name=name: nothing_of(stage, name))  # type: ignore[misc]

        assert [shown(name) for name in ("pod-a", "pod-b", "pod-c")] == [False, False, True]


def pages(*ranks: int) -> dict[str, Any]:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 0' for rank in range(3)]
    lines.append("process_start_time_seconds 1")
    sources = {
        str(rank): {"endpoint": f"tcp://127.0.0.1:{9 + rank}", "publisher": "zmq"} for rank in ranks
    }
    return {"/kv_event_sources": sources, "/metrics": (200, "\n".join(lines))}


async def test_ranks_that_go_are_dropped_and_those_that_come_are_found() -> None:
    settings = {"health__interval_s": 0.05, "health__load_interval_s": 0.1}
    async with FakeEngine() as engine:
        engine.pages |= pages(0, 1, 2)
        async with on_stage(engine, **settings, policy__name="round_robin") as stage:
            fleet = stage.router.fleet
            assert fleet.members.replica("r1").num_ranks == 3

            normal = engine.pages
            engine.pages = dict.fromkeys(normal, (503, "scaling"))
            await stage.until(lambda: not fleet.members.is_up("r1", 0.0))
            engine.pages = normal | pages(0, 1)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 2)
            await stage.until(lambda: fleet.members.is_up("r1", 0.0))
            for _ in range(6):
                assert (await stage.ask(chat("a"))).status == 200
            named = {r.headers.get("X-data-parallel-rank") for r in engine.received}
            assert named == {"0", "1"}

            engine.pages = normal | pages(0)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 1)
            engine.pages = normal | pages(0, 1, 2)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 3)


QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02, "health__timeout_s": 0.5}


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 32},
        {"data_parallel_size": 2},
        {"num_gpu_blocks": 512},
        {"hash_algorithm": "xxhash_cbor"},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_another_engine_at_the_address_is_discovered_again(other: dict[str, Any]) -> None:
    port = free_port()
    options = {"port": port, "num_gpu_blocks": 2048}
    prompt = chat(words(1, 200))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Emulator(EmulatorOptions(**options)))
        async with on_stage(engine.url, **QUICK) as stage:
            for _ in range(2):
                old = await stage.ask(prompt)
                await stage.settled(engine)
            assert old.predicted == old.reported > 0
            (before,) = stage.router.fleet.members.replicas
            await stack.aclose()
            async with Emulator(EmulatorOptions(**options | other)) as new:
                await stage.until(lambda: stage.log.count("replica found") == 4)  # two log forms
                await stage.ready()
                (replica,) = stage.router.fleet.members.replicas
                assert all(
                    stage.router.caches.index.num_blocks(c.id, "gpu") == 0
                    for c in (*candidates_of(before), *candidates_of(replica))
                )
                first = await stage.ask(prompt)
                await stage.settled(new)
                again = await stage.ask(prompt)

                assert (first.status, first.predicted, first.reported) == (200, 0, 0)
                assert again.predicted == again.reported > 0
                assert replica.block_size == other.get("block_size", before.block_size)
                assert replica.num_ranks == other.get("data_parallel_size", 1)


async def test_several_engines_at_one_address_are_named() -> None:
    """A process that was gone is back: by the log, `status` and /admin/replicas."""
    started = "process_start_time_seconds {}\n"
    async with FakeEngine(metrics=(200, started.format(1))) as engine:
        async with on_stage(engine, **QUICK) as stage:
            for number in (2, 3):
                engine.pages["/metrics"] = (200, started.format(number))
                num_found = stage.log.count("replica found")
                await stage.until(
                    lambda before=num_found: stage.log.count("replica found") > before  # type: ignore[misc]
                )
            assert "several engines" not in stage.log
            engine.pages["/metrics"] = (200, started.format(1))
            await stage.until(lambda: "several engines answer" in stage.log)
            await stage.ready()
            [row] = (await stage.admin("/admin/replicas")).json()["replicas"]
            assert row["ranks"][0]["has_several_engines"]
            state = (await stage.admin("/admin/state")).json()
            assert any("several engines answer" in line for line in degraded(state))
