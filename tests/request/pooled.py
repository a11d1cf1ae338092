"""A router in front of two emulated replicas that share an emulated pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from tests.faults.stage import Engines, Reply, Stage, chat, on_stage, streamed

PER_BLOCK = 1024


@asynccontextmanager
async def pooled(
    *,
    num_blocks: int = 4096,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Stage, PoolMaster, tuple[Emulator, Emulator]]]:
    """Two replicas, their pool, and a router that knows of it."""
    pool = EmulatedPool(capacity_bytes=num_blocks * PER_BLOCK, bytes_per_object=PER_BLOCK)
    async with PoolMaster(pool) as master:
        options = {"pool": master.url, "ms_per_fetched_token": 0.0} | (engine or {})
        flags = {
            "mooncake__master": master.url,
            "mooncake__verify_timeout_s": 5.0,
            "policy__name": "round_robin",
        } | settings
        async with (
            Engines(2, **options) as (one, two),
            on_stage(one, two, **flags) as stage,
        ):
            await stage.until(lambda: stage.pool.is_up)
            yield stage, master, (one, two)


def parts(reply: Reply) -> dict[str, int]:
    """Read the predicted tokens by tier."""
    pairs = (part.partition("=") for part in reply.headers["x-warmroute-cached"].split(";"))
    return {name: int(value) for name, _, value in pairs}


async def ask(stage: Stage, engines: tuple[Emulator, Emulator], *texts: str) -> Reply:
    """Ask, and wait until everything about it is known."""
    reply = await stage.ask(streamed(chat(*texts)))
    await stage.saved(*engines)
    return reply


async def named(stage: Stage) -> None:
    """Wait until the pool's keys are known, and what they look like."""
    await stage.until(lambda: "tiny" in stage.pool.layouts)


async def listed(stage: Stage) -> None:
    """Have the pool's keys listed now."""
    follower = stage.router.pools[""].follower
    stage.pool.wants_listing = True
    follower.list_again_s = 0.0
    await follower.step()
