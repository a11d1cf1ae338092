"""The emulated pool: its objects, its master's routes, and replicas that share it."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.events import EventPublisher
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.pool import PoolMaster
from loadtest.emulator.pool_client import PoolClient
from loadtest.engine_model.time_model import PRESETS
from router.kv_events.wire import BlockStored, KvEvent
from tests.emulator.completing import complete


def options(master: PoolMaster, **fields: Any) -> EmulatorOptions:
    return EmulatorOptions(
        pool=master.url,
        time_model=PRESETS["instant"],
        ms_per_fetched_token=0.0,
        num_gpu_blocks=512,
        **fields,
    )


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


async def test_new_objects_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event per block, on the cpu tier, as the connector does."""
    published: list[KvEvent] = []
    monkeypatch.setattr(
        EventPublisher, "publish", lambda publisher, events, ts: published.extend(events)
    )
    async with PoolMaster() as master, Emulator(options(master)) as one:
        await complete(one, list(range(100, 148)))
        await complete(one, list(range(100, 164)))

    seen = [
        event for event in published if isinstance(event, BlockStored) and event.medium == "cpu"
    ]
    assert [len(event.block_hashes) for event in seen] == [1, 1, 1, 1]
    assert seen[0].parent_block_hash is None
    assert seen[1].parent_block_hash == seen[0].block_hashes[0]
    assert seen[3].token_ids == list(range(148, 164))


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
