"""The emulated pool: its objects, its master's routes, and replicas that share it."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from loadtest.emulator.pool_client import PoolClient
from loadtest.emulator.time_model import PRESETS
from router.kv_events.wire import BlockStored


def test_the_least_recently_used_go_first() -> None:
    """A look-up by an engine is a use, one by the master's routes is not."""
    pool = EmulatedPool(capacity_bytes=30, bytes_per_object=10)
    assert pool.put(["a", "b", "c"]) == ["a", "b", "c"]
    assert pool.leading(["a", "x", "b"]) == 1
    assert pool.holds(["b", "x"]) == [True, False]
    assert pool.put(["a", "d"]) == ["d"]

    assert pool.keys() == ["c", "a", "d"]
    assert (pool.num_evicted, pool.num_put, len(pool)) == (1, 4, 3)
    pool.remove(["c", "x"])
    assert pool.leading(["a", "d"]) == 2
    pool.restart()
    assert (pool.num_evicted, pool.num_put, len(pool)) == (0, 0, 0)


def options(master: PoolMaster, **fields: Any) -> EmulatorOptions:
    return EmulatorOptions(
        pool=master.url,
        time_model=PRESETS["instant"],
        ms_per_fetched_token=0.0,
        num_gpu_blocks=512,
        **fields,
    )


async def complete(replica: Emulator, prompt: list[int], **fields: Any) -> int:
    """Complete a prompt; return the cached tokens that the replica reports."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3} | fields
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{replica.url}/v1/completions", json=body) as response:
            answer = await response.json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_master_answers_health_checks() -> None:
    async with PoolMaster() as master, aiohttp.ClientSession() as client:
        async with client.get(f"{master.url}/health") as answer:
            assert answer.status == 200
            assert await answer.json(content_type=None) == {"status": "ok"}


async def test_what_one_computes_the_other_fetches() -> None:
    """From block 0 on, the last token excepted; what is fetched is in its own cache then."""
    async with PoolMaster() as master:
        async with Emulator(options(master)) as one, Emulator(options(master)) as two:
            prompt = list(range(100, 260))
            assert await complete(one, prompt) == 0
            assert len(master.pool) == 10
            assert await complete(two, prompt) == 144
            master.pool.restart()
            assert await complete(two, prompt) == 144
            assert await complete(one, [*prompt, 1, 2, 3]) == 160
            assert await complete(two, prompt, cache_salt="other") == 0


async def test_a_hole_ends_what_is_fetched() -> None:
    """And what is missing is written again by a replica that has it."""
    async with PoolMaster() as master, Emulator(options(master)) as one:
        prompt = list(range(100, 260))
        await complete(one, prompt)
        assert await complete(one, prompt) == 144
        master.pool.remove(master.pool.keys()[3:4])
        async with Emulator(options(master)) as two:
            assert await complete(two, prompt) == 48
            assert len(master.pool) == 10


async def test_new_objects_are_reported_once() -> None:
    """One event per block, on the cpu tier, as the connector does."""
    async with PoolMaster() as master, Emulator(options(master)) as one:
        blocks = one.replica.ranks[0].engine.blocks
        seen: list[BlockStored] = []
        take = blocks.take_events

        def taken() -> list[Any]:
            events = take()
            seen.extend(e for e in events if isinstance(e, BlockStored) and e.medium == "cpu")
            return events

        one.replica.ranks[0].engine.blocks = _Watched(blocks, taken)  # type: ignore[assignment]
        await complete(one, list(range(100, 148)))
        await complete(one, list(range(100, 164)))

        assert [len(event.block_hashes) for event in seen] == [1, 1, 1, 1]
        assert seen[0].parent_block_hash is None
        assert seen[1].parent_block_hash == seen[0].block_hashes[0]
        assert seen[3].token_ids == list(range(148, 164))


class _Watched:
    """A block manager whose events are looked at on their way."""

    def __init__(self, blocks: Any, take: Any) -> None:
        self._blocks = blocks
        self.take_events = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)


async def test_a_pool_that_is_gone_has_nothing() -> None:
    """Replicas go on without it."""
    async with PoolMaster() as master, Emulator(options(master)) as one:
        await master.stop()
        prompt = list(range(100, 260))
        assert await complete(one, prompt) == 0
        assert await complete(one, prompt) == 144


async def test_fetching_takes_its_time() -> None:
    """By the token, at the configured speed."""
    client = PoolClient("http://127.0.0.1:9", "tiny", ms_per_token=0.5)

    assert client.fetch_s(1000) == 0.5
    assert client.fetch_s(-5) == 0.0
    assert await client.leading([]) == 0
    assert await client.put([]) == []
    assert await client.leading([b"1"]) == 0
    assert await client.put([b"1"]) == []
    await client.close()
    await client.close()


@pytest.mark.parametrize("path", ["/nothing", "/emulator/nothing"])
async def test_other_routes_are_not_there(path: str) -> None:
    """As at the real master's."""
    async with PoolMaster() as master, aiohttp.ClientSession() as client:
        async with client.post(master.url + path, data=b"[]") as response:
            assert response.status == 404
        assert master.num_asked == {path: 1}
