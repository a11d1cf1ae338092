"""Several Mooncake masters behind a whole router: the leader dies while requests run."""

from __future__ import annotations

import asyncio

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from tests.faults.stage import Engines, Reply, chat, on_stage, streamed, words
from tests.request.pooled import ask, named


async def test_a_leader_that_dies_is_followed_by_the_next_and_fails_no_request() -> None:
    """What the old one held is not believed; what engines store at the new one is fetched."""
    async with PoolMaster(EmulatedPool()) as old, PoolMaster(EmulatedPool()) as new:
        new.ha_status = "standby"
        settings = {
            "mooncake__master": f"{old.url},{new.url}",
            "mooncake__verify_timeout_s": 5.0,
            "policy__name": "round_robin",
        }
        async with (
            Engines(2, pool=old.url, ms_per_fetched_token=0.0) as (one, two),
            on_stage(one, two, **settings) as stage,
        ):
            engines = (one, two)
            await stage.until(lambda: stage.pool.is_up)
            await ask(stage, engines, words(1))
            await named(stage)

            async def go_on(number: int) -> list[Reply]:
                return [await stage.ask(streamed(chat(words(number)))) for _ in range(4)]

            async with asyncio.TaskGroup() as tg:
                running = [tg.create_task(go_on(number)) for number in (1, 2)]
                await old.stop()
                await stage.until(lambda: not stage.pool.is_up)
                new.ha_status = "serving"
                for engine in engines:
                    assert engine.replica.pool is not None
                    engine.replica.pool.url = new.url
                await stage.until(lambda: stage.pool.is_up)
            replies = [reply for task in running for reply in task.result()]
            await stage.saved(*engines)
            first, second = [await ask(stage, engines, words(3)) for _ in range(2)]

            assert [reply.status for reply in replies] == [200] * 8
            assert stage.router.pools[""].master.url == new.url
            assert "another Mooncake master is the leader now" in stage.log
            assert {first.replica, second.replica} == {"r1", "r2"}
            assert second.predicted == second.reported > 0
