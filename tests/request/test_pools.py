"""A whole router in front of two pools: what one holds is no help to the other's replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from router.base.messages import pool_lister
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Json, Reply, Stage, chat, on_stage, streamed, words
from tests.redis_servers import RedisServer
from tests.request.pooled import parts


class TwoPools(NamedTuple):
    """Replicas r1 and r3 are in pool a, r2 and r4 in b."""

    masters: Sequence[PoolMaster]
    engines: Sequence[Emulator]

    @property
    def settings(self) -> dict[str, Any]:
        names = "abab"
        return {
            "mooncake__pools": [
                {"name": name, "master": master.url}
                for name, master in zip("ab", self.masters, strict=True)
            ],
            "replicas": [
                {"url": engine.url, "pool": name}
                for engine, name in zip(self.engines, names, strict=True)
            ],
            "mooncake__verify_timeout_s": 5.0,
            "policy__name": "round_robin",
        }


@asynccontextmanager
async def two_pools() -> AsyncIterator[TwoPools]:
    """Two masters, and two engines for each."""
    async with PoolMaster(EmulatedPool()) as one, PoolMaster(EmulatedPool()) as other:
        async with (
            Engines(2, pool=one.url, ms_per_fetched_token=0.0) as (r1, r3),
            Engines(2, pool=other.url, ms_per_fetched_token=0.0) as (r2, r4),
        ):
            yield TwoPools((one, other), (r1, r2, r3, r4))


def is_up(stage: Stage, name: str) -> bool:
    return stage.router.pools[name].catalog.is_up


async def up(stage: Stage) -> None:
    """Wait until both pools are counted on."""
    await stage.until(lambda: is_up(stage, "a") and is_up(stage, "b"))


async def ask(stage: Stage, pools: TwoPools, text: str) -> Reply:
    """Ask, and wait until the pool has what was computed, and its keys are known."""
    reply = await stage.ask(streamed(chat(text)))
    await stage.saved(*pools.engines)
    pool = stage.router.fleet.members.replica(reply.replica).pool
    assert pool is not None
    await stage.until(lambda: "tiny" in stage.router.pools[pool].catalog.layouts)
    return reply


async def in_pools(stage: Stage, text: str) -> dict[str, tuple[str | None, int | None]]:
    """Ask the router what each replica's pool has of a prompt: the pool's name, tokens."""
    explained: Json = (await stage.admin("/admin/explain", chat(text))).json()
    return {
        each["view"]["id"]: (each["pool"], each["view"]["num_pool_tokens"])
        for each in explained["candidates"]
    }


async def test_what_one_pool_holds_is_credited_to_its_own_replicas_alone() -> None:
    """Predicted as reported, in both; in explanations, metrics and descriptions by pool."""
    async with two_pools() as pools, on_stage(**pools.settings) as stage:
        await up(stage)
        first = await ask(stage, pools, words(1))
        held = await in_pools(stage, words(1))
        replies = [await ask(stage, pools, words(1)) for _ in range(3)]
        described = (await stage.admin("/admin/pool")).json()

        assert (first.replica, [reply.replica for reply in replies]) == ("r1", ["r2", "r3", "r4"])
        num_held = held["r3"][1]
        assert num_held
        assert held == {
            "r1": ("a", num_held),
            "r2": ("b", 0),
            "r3": ("a", num_held),
            "r4": ("b", 0),
        }
        assert parts(replies[0])["pool"] == replies[0].reported == 0
        for reply in replies[1:]:
            assert parts(reply)["pool"] == reply.predicted == reply.reported == num_held
        assert described["pool"] is None
        assert {each["name"]: each["replicas"] for each in described["pools"]} == {
            "a": ["r1", "r3"],
            "b": ["r2", "r4"],
        }
        for name in "ab":
            assert stage.metric("warmroute_pool_blocks", pool=name, model="tiny") > 0
            assert stage.metric("warmroute_pool_verifications_total", pool=name) > 0
            assert stage.metric("warmroute_pool_up", pool=name) == 1


async def test_each_pool_s_master_dies_alone() -> None:
    """Nothing of its pool is counted on; the other's fetches go on, and no request fails."""
    async with two_pools() as pools, on_stage(**pools.settings) as stage:
        await up(stage)
        for _ in range(4):
            await ask(stage, pools, words(1))
        await pools.masters[0].stop()
        await stage.until(lambda: not is_up(stage, "a"))
        found = await in_pools(stage, words(1))
        replies = [await stage.ask(streamed(chat(words(2)))) for _ in range(4)]
        ups = [stage.metric("warmroute_pool_up", pool=name) for name in "ab"]
        await pools.masters[0].start()
        await up(stage)

        assert [found[name] for name in ("r1", "r3")] == [(None, None)] * 2
        assert found["r2"] == found["r4"]
        assert found["r4"][1]
        assert ups == [0, 1]
        assert [reply.status for reply in replies] == [200] * 4
        assert replies[3].replica == "r4"
        assert replies[3].reported > 0


async def test_one_that_is_in_another_pool_is_found_out() -> None:
    """After several fetches that did not happen, as one without a connector."""
    async with two_pools() as pools, on_stage(**pools.settings) as stage:
        client = pools.engines[3].replica.pool
        assert client is not None
        client.url = pools.masters[0].url
        await up(stage)
        for number in range(0, 60, 3):  # r2 stores it in b, and r4 looks for it in a
            for text in (words(number), words(number + 1), words(number + 2), words(number + 1)):
                await ask(stage, pools, text)
            if "does not read the pool" in stage.log:
                break
        described = (await stage.admin("/admin/pool")).json()

        assert {each["name"]: each["detached"] for each in described["pools"]} == {
            "a": [],
            "b": ["r4"],
        }


async def test_one_without_a_pool_s_name_reads_none() -> None:
    """It is added at the admin API, and served; the log says what to do."""
    async with two_pools() as pools:
        known, added = pools.engines[:2], pools.engines[2]
        settings = pools.settings
        settings["replicas"] = settings["replicas"][:2]
        async with on_stage(**settings) as stage:
            await up(stage)
            for engine in known:
                await ask(stage, TwoPools(pools.masters, known), words(1))
                assert engine.replica.pool is not None
            wrong = await stage.admin("/admin/replicas", {"url": added.url, "pool": "c"})
            await stage.admin("/admin/replicas", {"url": added.url, "name": "new"})
            await stage.until(
                lambda: "new" in {r.name for r in stage.router.fleet.members.replicas}
            )
            found = await in_pools(stage, words(1))

            assert "unknown pool 'c'; write a, b, or false" in wrong.error["message"]
            assert found["new"] == (None, None)
            assert found["r1"][1]
            assert "it counts as reading none" in stage.log


async def test_routers_share_each_pool_s_directory(shared_redis: RedisServer) -> None:
    """One of them lists each; what is learned of one pool is never taken for the other's."""
    async with two_pools() as pools:
        settings = pools.settings
        async with (
            on_stage(redis=shared_redis, **settings) as one,
            on_stage(redis=shared_redis, **settings) as other,
        ):
            for stage in (one, other):
                await stage.until(lambda stage=stage: stage.metric("warmroute_redis_up") == 1)
                await up(stage)
            await ask(one, pools, words(1))

            def held(stage: Stage, name: str) -> set[int]:
                return set(stage.router.pools[name].catalog.directory("tiny").keys())

            await other.until(lambda: held(other, "a") == held(one, "a") != set())
            await other.until(
                lambda: all(
                    shared_redis.client.exists(f"{{wr:default}}:lease:{pool_lister(name)}")
                    for name in "ab"
                )
            )
            await other.until(lambda: "tiny" in other.router.pools["a"].catalog.layouts)
            found = await in_pools(other, words(1))

            assert held(one, "b") == held(other, "b") == set()
            assert found["r3"][1]
            assert found["r4"][1] == 0
            for name in "ab":
                follower = [stage.router.pools[name].follower for stage in (one, other)]
                await one.until(lambda f=follower: sum(each.is_lister for each in f) == 1)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_engine_in_dev_mode_reports_its_layout(
    monkeypatch: pytest.MonkeyPatch, *, is_busy: bool
) -> None:
    """Its `cache_prefix` chooses among the layouts of a model, also if it is late once."""
    monkeypatch.setattr("router.discovery.watches._INFO_S", (1.0, 10.0))
    store = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_extra_config": {"cache_prefix": "tp2"},
    }
    page = {"vllm_config": {"model_config": {"model": "tiny"}, "kv_transfer_config": store}}
    pool = EmulatedPool()
    pool.put([f"{prefix}@tiny@tp_rank:0@{1:064x}" for prefix in ("tp1", "tp2")])
    engine = FakeEngine(server_info=page, is_paused={"is_paused": False})
    engine.hanging = {"/server_info"} if is_busy else set()
    async with PoolMaster(pool) as master, engine:
        settings = {"mooncake__master": master.url, "ready": False}
        async with on_stage(replicas=[engine.url], **settings) as stage:
            if is_busy:
                await engine.reached.wait()
                engine.hanging.clear()
            catalog = stage.router.pools[""].catalog
            await stage.until(lambda: bool(catalog.layouts))

            assert {name: layout.text for name, layout in catalog.layouts.items()} == {
                "tiny@@tp2@tiny": "tp2@tiny@tp_rank:0"
            }
