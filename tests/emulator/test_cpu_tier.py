"""The emulated CPU tier: what comes back from it, and what is published."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.events import EventPublisher
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS
from router.kv_events.wire import BlockRemoved, BlockStored, KvEvent
from tests.emulator.completing import complete

SIZE = 16


def options(**fields: Any) -> EmulatorOptions:
    """Describe a replica whose cache has room for one prompt of ten blocks."""
    small: dict[str, Any] = {"num_gpu_blocks": 12, "cpu_blocks": 64, "ms_per_cpu_token": 0.0}
    return EmulatorOptions(time_model=PRESETS["instant"], **(small | fields))


def prompt(number: int, num_blocks: int = 10) -> list[int]:
    """Make a prompt of so many blocks and five tokens."""
    return [100 + number * 200 + position for position in range(num_blocks * SIZE + 5)]


async def test_what_the_cache_evicts_comes_back_from_the_tier() -> None:
    async with Emulator(options()) as replica:
        assert await complete(replica, prompt(0)) == 0
        assert await complete(replica, prompt(1)) == 0
        assert await complete(replica, prompt(0)) == 10 * SIZE
    async with Emulator(options(cpu_blocks=0)) as replica:
        for number in (0, 1, 0):
            cached = await complete(replica, prompt(number))
            assert cached < SIZE


async def test_a_prompt_of_whole_blocks_comes_back_whole() -> None:
    """Its last token is computed for the answer, and vLLM reports it as cached all the same."""
    async with Emulator(options()) as replica:
        whole = prompt(0)[: 10 * SIZE]
        await complete(replica, whole)
        await complete(replica, prompt(1))
        assert await complete(replica, whole) == 10 * SIZE


async def test_a_tier_that_is_full_drops_what_was_used_longest_ago() -> None:
    """Of the oldest prompt the last blocks go first: eight of thirty do not fit."""
    async with Emulator(options(cpu_blocks=22)) as replica:
        for number in (0, 1, 2):
            await complete(replica, prompt(number))
        assert await complete(replica, prompt(0)) == 2 * SIZE
        assert await complete(replica, prompt(2)) == 10 * SIZE


async def test_reading_takes_its_time() -> None:
    """160 tokens at 2 ms each."""
    async with Emulator(options(ms_per_cpu_token=2.0)) as replica:
        await complete(replica, prompt(0))
        await complete(replica, prompt(1))
        begun_s = time.monotonic()
        cached = await complete(replica, prompt(0))
        took_s = time.monotonic() - begun_s

    assert cached == 10 * SIZE
    assert took_s >= 0.32


async def test_events_name_the_medium_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored block has an event of its own, without tokens; removals are one event."""
    published: list[KvEvent] = []
    monkeypatch.setattr(
        EventPublisher, "publish", lambda publisher, events, ts: published.extend(events)
    )
    async with Emulator(options(cpu_blocks=12)) as replica:
        await complete(replica, prompt(0))
        await complete(replica, prompt(1))

    tier = [event for event in published if getattr(event, "medium", None) == "CPU"]
    gpu = {
        name
        for event in published
        if isinstance(event, BlockStored) and event.medium == "GPU"
        for name in event.block_hashes
    }
    stored = [event for event in tier if isinstance(event, BlockStored)]
    removed = [event for event in tier if isinstance(event, BlockRemoved)]
    assert [len(event.block_hashes) for event in stored] == [1] * 20
    assert {event.block_hashes[0] for event in stored} == gpu
    assert all(event.block_size == 0 and not event.token_ids for event in stored)
    assert [len(event.block_hashes) for event in removed] == [8]


async def test_a_reset_clears_the_tier_only_if_it_is_asked_to() -> None:
    async with Emulator(options()) as replica, aiohttp.ClientSession() as client:
        await complete(replica, prompt(0))
        for query, cached in (("", 10 * SIZE), ("?reset_external=true", 0)):
            async with client.post(f"{replica.url}/reset_prefix_cache{query}") as response:
                assert (await response.json())["success"]
            assert await complete(replica, prompt(0)) == cached


async def test_a_client_that_leaves_during_a_read_leaves_nothing_behind() -> None:
    """The blocks that were read can be evicted and read again."""
    async with Emulator(options(ms_per_cpu_token=5.0)) as replica:
        await complete(replica, prompt(0))
        await complete(replica, prompt(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await complete(replica, prompt(0))
        cached = await complete(replica, prompt(0))

    assert cached == 10 * SIZE
