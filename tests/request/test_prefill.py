"""A whole router in front of emulated prefill and decode replicas that share an emulated pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec import Struct

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from tests.faults.stage import (
    STUCK,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    on_stages,
    records_in,
    streamed,
    words,
)
from tests.redis_servers import Start

PER_BLOCK = 1024
LONG = 400  # words: far dearer to compute than to read


class Split(Struct):
    """A router, prefill and decode replicas by name, and their pool."""

    stage: Stage
    pool: PoolMaster
    engines: dict[str, Emulator]

    @property
    def p(self) -> Emulator:
        return self.engines["p1"]

    async def ask(self, body: Json, path: str = "/v1/chat/completions", **more: Any) -> Reply:
        """Ask, and wait until everything about it is known."""
        reply = await self.stage.ask(body, path, **more)
        await self.stage.saved(*self.engines.values())
        return reply

    def prefills(self, **labels: str) -> float:
        return self.stage.metric("warmroute_prefills_total", **labels)


@asynccontextmanager
async def split(
    num_prefill: int = 1,
    num_decode: int = 2,
    *,
    prefill: Json | None = None,
    **settings: Any,
) -> AsyncIterator[Split]:
    """Run prefill replicas p1, … and decode replicas d1, …; `prefill` are options of the former."""
    pool = EmulatedPool(capacity_bytes=4096 * PER_BLOCK, bytes_per_object=PER_BLOCK)
    async with PoolMaster(pool) as master:
        options = {"pool": master.url, "ms_per_fetched_token": 0.0}
        async with (
            Engines(num_prefill, kv_role="producer", **(options | (prefill or {}))) as ps,
            Engines(num_decode, kv_role="consumer", **options) as ds,
        ):
            engines = {f"p{number}": engine for number, engine in enumerate(ps, 1)}
            engines |= {f"d{number}": engine for number, engine in enumerate(ds, 1)}
            roles = {"p": "prefill", "d": "decode"}
            flags = {
                "mooncake__master": master.url,
                "mooncake__verify_timeout_s": 5.0,
                "prefill__store_wait_s": 5.0,
                "replicas": [
                    {"url": engine.url, "name": name, "role": roles[name[0]]}
                    for name, engine in engines.items()
                ],
            } | settings
            async with on_stage(*engines.values(), **flags) as stage:
                await stage.until(lambda: stage.pool.is_up)
                yield Split(stage, master, engines)


def long_chat(number: int, **fields: Any) -> Json:
    return chat(words(number, LONG), **fields)


BODIES: list[tuple[str, Json]] = [
    ("/v1/chat/completions", streamed(long_chat(1))),
    ("/v1/chat/completions", long_chat(1, n=2, stop=["x"], max_completion_tokens=3)),
    ("/v1/completions", {"model": "tiny", "prompt": words(1, LONG), "max_tokens": 4}),
    ("/v1/messages", long_chat(1)),
    ("/v1/responses", {"model": "tiny", "input": words(1, LONG), "max_output_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_is_computed_by_one_and_answered_by_another(
    tmp_path: Path, path: str, body: Json
) -> None:
    """On every API; the decode replica reads it all from the pool, as predicted."""
    log = tmp_path / "decisions.jsonl"
    async with split(log__decisions=log) as it:
        reply = await it.ask(body, path)

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "p1"
        assert reply.replica in ("d1", "d2")
        assert reply.predicted > 1000
        assert it.prefills(result="remote", why="chosen") == 1
        (computed,) = it.p.replica.ranks
        assert computed.stats.finished["length"] == 1
        assert computed.engine.scheduler.stats.num_generation_tokens == 1
        holder = it.engines[reply.replica]
        scheduler = holder.replica.ranks[0].engine.scheduler.stats
        assert scheduler.num_cache_hits >= reply.predicted
        assert it.stage.metric("warmroute_audited_total", result="exact") == 1
    (record,) = records_in(log)
    assert record.prefill is not None
    assert (record.prefill.result, record.prefill.candidate) == ("remote", "p1")
    assert record.prefill.cost is not None
    assert record.prefill.cost.id == "p1"
    assert record.policy == "decode_load"
    assert record.prefill.policy == "kv_aware"
    assert record.by_policy == (record.prefill.snapshot, record.prefill.decision)
    assert record.prefill.decision is not None
    assert record.prefill.decision.candidate == "p1"
    assert record.prefill.num_predicted_cached_tokens == 0
    assert record.prefill.num_reported_cached_tokens == 0
    assert record.prefill.here_ms > record.prefill.there_ms
    assert record.policy == "decode_load"
    assert {view.id for view in record.snapshot.replicas} == {"d1", "d2"}
    assert record.num_predicted_cached_tokens == reply.predicted


async def test_a_session_stays_where_its_answer_is() -> None:
    """There it has least to read; what a turn added is too little to be computed elsewhere."""
    async with split() as it:
        first = await it.ask(long_chat(1))
        second = await it.ask(chat(words(1, LONG), first.text, "and?"))

        assert second.replica == first.replica
        assert second.headers["x-warmroute-prefill"] == "local"
        assert second.predicted == second.reported > first.predicted
        assert it.prefills(result="local", why="cheaper") == 1


async def test_explain_shows_both_halves() -> None:
    """Every candidate of either, with what each costs; nothing is sent."""
    async with split() as it:
        explained = (await it.stage.admin("/admin/explain", long_chat(1))).json()

        assert explained["policy"] == "decode_load"
        assert {c["view"]["id"] for c in explained["candidates"]} == {"d1", "d2"}
        prefill = explained["prefill"]
        assert (prefill["where"], prefill["why"]) == ("p1", "chosen")
        assert prefill["here_ms"] > prefill["there_ms"]
        assert [view["id"] for view in prefill["candidates"]] == ["p1"]
        assert prefill["decision"]["costs"][0]["id"] == "p1"


@pytest.mark.parametrize("policy", ["kv_aware", "mooncake"])
async def test_a_conversations_prompts_go_on_where_they_were_computed(policy: str) -> None:
    """By the policy, among prefill replicas: each has the beginnings of its own ones."""
    async with split(2, 1, policy__name=policy) as it:
        stage, engines = it.stage, it.engines
        for number in range(1, 5):
            begun = await stage.ask(long_chat(number))
            await stage.saved(*engines.values())
            further = chat(words(number, LONG), "ok", words(100 + number, LONG))
            explained = (await stage.admin("/admin/explain", further)).json()["prefill"]
            went_on = await stage.ask(further)
            await stage.saved(*engines.values())

            where = begun.headers["x-warmroute-prefill"]
            assert where in ("p1", "p2")
            assert went_on.headers["x-warmroute-prefill"] == where
            held = {view["id"]: view["num_gpu_tokens"] for view in explained["candidates"]}
            assert held.pop(where) > 1000 > max(held.values())


async def test_without_a_prefill_replica_prompts_are_computed_where_they_are_decoded() -> None:
    """It drains, or is gone."""
    async with split() as it:
        await it.stage.admin("/admin/replicas/p1/drain", {"draining": True})
        reply = await it.ask(long_chat(1))

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "local"
        assert it.prefills(result="local", why="no_replica") == 1


FAULTS: list[tuple[str, Json, str]] = [
    ("status", {"status": 500}, "status_500"),
    ("die_after", {}, "upstream_broken"),
    ("status", {"status": 404}, "status_404"),
]


def patience_s(why: str) -> float:
    """A timeout that no busy machine reaches, unless it is what the test is about."""
    return 0.3 if why == "timeout" else 30.0


@pytest.mark.parametrize(("kind", "fields", "why"), FAULTS)
async def test_whatever_a_prefill_replica_does_its_prompt_is_answered(
    kind: str, fields: Json, why: str
) -> None:
    """Once and once more: the decode replica computes it itself."""
    async with split(prefill__timeout_s=30.0) as it:
        arm(it.p, kind, count=2, **fields)
        replies = [await it.stage.ask(long_chat(number)) for number in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert {reply.headers["x-warmroute-prefill"] for reply in replies} == {"local"}
        assert it.prefills(result="failed", why=why) == 2


@pytest.mark.parametrize(
    ("kind", "why", "where"),
    [
        ("status", "status_500", "remote"),
        ("hang", "timeout", "local"),
    ],
)
async def test_another_prefill_replica_takes_over_from_one_that_fails(
    kind: str, why: str, where: str, tmp_path: Path
) -> None:
    """Once, and not from one that took all the time there is; the record names the second."""
    log = tmp_path / "decisions.jsonl"
    limits = {"prefill__timeout_s": patience_s(why), "log__decisions": log}
    async with split(2, 1, **limits) as it:
        stage, engines = it.stage, it.engines
        explained = (await stage.admin("/admin/explain", long_chat(1))).json()
        first = explained["prefill"]["where"]
        other = {"p1": "p2", "p2": "p1"}[first]
        arm(engines[first], kind, count=1, status=500)
        reply = await stage.ask(long_chat(1))
        await stage.saved(*engines.values())

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == (other if where == "remote" else "local")
        assert stage.metric("warmroute_prefills_total", result="failed", why=why) == 1
        assert stage.metric("warmroute_prefills_total", result="remote") == (where == "remote")
        finished = engines[other].replica.ranks[0].stats.finished["length"]
        assert finished == (where == "remote")
    (record,) = records_in(log)
    assert record.prefill is not None
    assert record.prefill.candidate == (other if where == "remote" else first)


async def test_a_prompt_leaves_a_prefill_replica_that_is_paused() -> None:
    """At once, for another one; nobody is to blame."""
    async with split(2, 1) as it, asyncio.TaskGroup() as tg:
        stage, engines = it.stage, it.engines
        explained = (await stage.admin("/admin/explain", long_chat(1))).json()
        first = explained["prefill"]["where"]
        arm(engines[first], "hang", count=1)
        asked = tg.create_task(stage.ask(long_chat(1)))
        await stage.until(lambda: stage.router.fleet.load.num_sent(first))
        await stage.admin("/admin/control", {"route": "pause", "replicas": [first]})
        reply = await asked

        assert reply.headers["x-warmroute-prefill"] == {"p1": "p2", "p2": "p1"}[first]
        assert it.prefills(result="failed", why="set_aside") == 1
        assert stage.router.fleet.load.status(0.0)[0].reason == ""


async def test_where_all_prefill_replicas_fail_the_prompt_is_computed_by_the_third() -> None:
    """Each was asked once; both are free again."""
    async with split(2, 1) as it:
        stage, engines = it.stage, it.engines
        for name in ("p1", "p2"):
            arm(engines[name], "status", count=2, status=500)
        reply = await stage.ask(long_chat(1))

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "local"
        assert stage.metric("warmroute_prefills_total", result="failed") == 2


async def test_a_prefill_replica_that_dies_is_no_client_s_error() -> None:
    """Killed before and between requests, it costs nothing but its time."""
    async with split() as it:
        arm(it.p, "kill")
        await it.p.changed.wait()
        replies = [await it.stage.ask(long_chat(number)) for number in range(3)]

        assert [reply.status for reply in replies] == [200] * 3
        assert {reply.headers["x-warmroute-prefill"] for reply in replies} == {"local"}
        assert it.prefills(result="failed") >= 1
        assert it.prefills(result="local", why="no_replica") >= 1


async def test_a_prompt_that_ends_prefill_replicas_does_not_get_to_its_decode_replica() -> None:
    """Two deaths are enough, whatever the replicas were there for."""
    async with split(2, 1) as it:
        stage, engines = it.stage, it.engines
        for engine in engines.values():
            arm(engine, "kill_before", text="poisoned prompt")
        poisoned = long_chat(1) | chat("poisoned prompt " + words(1, 600))
        replies = [await stage.ask(poisoned)]
        await stage.until(lambda: stage.router.deaths.num_suspects == 2)
        replies.append(await stage.ask(poisoned))

        assert [reply.status for reply in replies] == [502, 422]
        assert sum(engine.is_dead for engine in engines.values()) == 2


async def test_a_prefill_replica_that_hangs_is_left_in_time() -> None:
    """The decode replica computes the prompt itself, and the other engine stops."""
    async with split(prefill={"time_model": STUCK}, prefill__timeout_s=0.2) as it:
        reply = await it.stage.ask(long_chat(1))

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "local"
        assert it.prefills(result="failed", why="timeout") == 1
        await it.stage.until(lambda: num_running(it.p) == 0)


async def test_a_client_that_leaves_ends_its_prompt() -> None:
    """Both replicas are free again, and no record says that it was answered."""
    async with split(prefill={"time_model": STUCK}) as it:
        async with it.stage.hanging_up(long_chat(1)):
            await it.stage.until(lambda: num_running(it.p) == 1)
            statuses = it.stage.router.fleet.load.status(asyncio.get_running_loop().time())
            assert sorted(s.num_requests for s in statuses) == [0, 1, 1]
        await it.stage.until(lambda: num_running(it.p) == 0)
        await it.stage.until(lambda: not it.stage.leftovers())

        assert it.stage.metric("warmroute_requests_total", outcome="client_gone") == 1


@pytest.mark.parametrize("kind", ["die_before", "status"])
async def test_a_decode_replica_that_fails_is_replaced(kind: str, tmp_path: Path) -> None:
    """The prompt is not computed again: the pool has it."""
    log = tmp_path / "decisions.jsonl"
    async with split(log__decisions=log) as it:
        explained = (await it.stage.admin("/admin/explain", long_chat(1))).json()
        first = explained["decision"]["candidate"]  # as it is decided again
        arm(it.engines[first], kind, count=1)
        reply = await it.ask(long_chat(1))

        assert reply.status == 200
        assert {reply.replica, first} == {"d1", "d2"}
        assert reply.headers["x-warmroute-prefill"] == "p1"
        assert reply.predicted == reply.reported > 1000
        assert it.prefills(result="remote") == 1
        assert it.prefills(result="local", why="done") == 1
        assert it.p.replica.ranks[0].stats.finished["length"] == 1
    (record,) = records_in(log)
    assert record.prefill is not None
    assert record.prefill.result == "remote"
    assert [each.candidate for each in record.tries] == [first, reply.replica]


async def test_both_halves_fail_at_once() -> None:
    """The prompt is computed by the decode replica that is left."""
    async with split() as it:
        first = (await it.ask(chat(words(1, LONG // 8)))).replica  # has least to read
        arm(it.p, "die_before", count=2)  # a kept connection that ends is tried once more
        arm(it.engines[first], "die_before", count=2)
        reply = await it.ask(long_chat(1))

        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "local"
        assert it.prefills(result="failed", why="upstream_broken") == 1
        assert it.prefills(result="local", why="failed") == 1


async def test_a_request_that_an_engine_refuses_is_refused_by_the_decode_replica() -> None:
    """Its client gets that answer; the prefill replica is not blamed."""
    async with split() as it:
        reply = await it.stage.ask(long_chat(1, temperature=-1))

        assert reply.status == 400
        assert "temperature" in orjson.dumps(reply.error).decode()
        assert it.prefills(result="failed", why="status_400") == 1
        assert it.stage.router.fleet.members.is_up("p1", asyncio.get_running_loop().time())


async def test_a_fleet_without_roles_knows_nothing_of_it() -> None:
    """No header, no metric, no field of a record's."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(long_chat(1))

        assert "x-warmroute-prefill" not in reply.headers
        assert stage.metric("warmroute_prefills_total") == 0
        assert not stage.router.fleet.members.is_split


async def test_two_routers_count_both_halves(start_redis: Start) -> None:
    """What one has in flight at either replica the other sees, and sees end."""
    pool = EmulatedPool(capacity_bytes=4096 * PER_BLOCK, bytes_per_object=PER_BLOCK)
    async with PoolMaster(pool) as master:
        async with (
            Engines(1, kv_role="producer", pool=master.url, time_model=STUCK) as (p,),
            Engines(1, kv_role="consumer", pool=master.url) as (d,),
        ):
            replicas = [{"url": p.url, "role": "prefill"}, {"url": d.url, "role": "decode"}]
            async with on_stages(p, d, redis=start_redis(), replicas=replicas) as (one, two):
                async with one.hanging_up(long_chat(1)):
                    await two.until(lambda: num_elsewhere(two) == [1, 1])
                await two.until(lambda: num_elsewhere(two) == [0, 0])


def num_elsewhere(stage: Stage) -> list[int]:
    """Count what other routers have in flight at each replica."""
    now_s = asyncio.get_running_loop().time()
    return [status.num_elsewhere for status in stage.router.fleet.load.status(now_s)]
