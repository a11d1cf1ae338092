"""A whole router in front of engines that draft (EAGLE, MTP): they drop the last block of each
hit, or hash the tokens after it."""

from __future__ import annotations

import pytest

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from policies.view import CandidateId
from tests.faults.stage import Engines, Stage, chat, on_stage, streamed, words


async def test_a_configured_replica_is_predicted_to_the_block() -> None:
    """From the first turn on; /admin/explain says so."""
    async with Engines(1, eagle=True) as (engine,):
        replicas = [{"url": engine.url, "eagle": True}]
        async with on_stage(engine, replicas=replicas) as stage:
            texts = [words(1)]
            for number in range(2, 6):
                reply = await stage.ask(streamed(chat(*texts)))
                await stage.settled(engine)
                assert reply.predicted == reply.reported
                texts += ["ok", words(number, 40)]
            explained = await stage.admin("/admin/explain", chat(*texts))

            assert reply.reported > 0
            assert explained.json()["candidates"][0]["drops_last_block"] is True
            assert stage.metric("warmroute_last_block_dropped", replica="r1") == 1


async def test_the_pool_gives_a_block_less_too() -> None:
    """What one replica stored, the other reads but for the last block."""
    pool = EmulatedPool(capacity_bytes=1 << 22, bytes_per_object=1024)
    async with (
        PoolMaster(pool) as master,
        Engines(2, eagle=True, pool=master.url, ms_per_fetched_token=0.0) as engines,
    ):
        replicas = [{"url": engine.url, "eagle": True} for engine in engines]
        settings = {"mooncake__master": master.url, "policy__name": "round_robin"}
        async with on_stage(
            *engines, replicas=replicas, mooncake__verify_timeout_s=5.0, **settings
        ) as stage:
            await stage.until(lambda: stage.pool.is_up)
            first = await stage.ask(streamed(chat(words(1))))
            await stage.saved(*engines)
            await stage.until(lambda: "tiny" in stage.pool.layouts)
            second = await stage.ask(streamed(chat(words(1))))

            assert first.replica != second.replica
            assert "pool=0" not in second.headers["x-warmroute-cached"]
            assert second.predicted == second.reported > 0


def num_ahead(stage: Stage) -> int:
    """How many tokens after a block its hash covers, as far as events have shown."""
    contract = stage.router.caches.contract(CandidateId("r1"))
    return contract.lookahead if contract is not None else 0


@pytest.mark.parametrize("eagle", [None, True])
@pytest.mark.parametrize("lookahead", [1, 3])
async def test_hashes_that_cover_the_next_tokens_are_predicted(
    lookahead: int, eagle: bool | None
) -> None:
    """To the block, with replies in the next prompts; `eagle: true` is overruled and shown so."""
    async with Engines(1, lookahead=lookahead) as (engine,):
        replicas = [{"url": engine.url} if eagle is None else {"url": engine.url, "eagle": eagle}]
        async with on_stage(engine, replicas=replicas) as stage:
            texts = [words(1)]
            for number in range(2, 9):
                reply = await stage.ask(streamed(chat(*texts)))
                await stage.until(lambda: num_ahead(stage) == lookahead)
                await stage.settled(engine)
                assert reply.predicted == reply.reported
                texts += ["ok", words(number, 10 + number)]

            assert reply.reported > 0
            assert stage.metric("warmroute_last_block_dropped", replica="r1") == 0
            (rank,) = stage.router.status.candidates().values()
            assert not rank["drops_last_block"]


async def test_a_prompt_that_parts_behind_a_block_hits_a_block_less() -> None:
    """The next token is another one, so the block's hash is."""
    async with Engines(1, lookahead=1) as (engine,), on_stage(engine) as stage:
        ids = list(range(300, 364))
        first = streamed({"model": "tiny", "prompt": ids, "max_tokens": 2})
        await stage.ask(first, path="/v1/completions")
        await stage.until(lambda: num_ahead(stage) == 1)
        await stage.settled(engine)

        other = await stage.ask(first | {"prompt": [*ids[:48], 9, *ids]}, path="/v1/completions")

        assert other.predicted == other.reported == 32
