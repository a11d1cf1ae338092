"""Another engine at the same address: nothing of the old one counts for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from router.observers.live.degraded import degraded
from router.replicas.replica import candidates_of
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage, words
from tests.ports import free_port

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
