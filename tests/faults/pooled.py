"""A router in front of two engines that share a pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from tests.faults.stage import Engines, Reply, Stage, chat, on_stage, words


class Pooled:
    """A router in front of two engines that share a pool."""

    def __init__(self, stage: Stage, engines: Sequence[Emulator], master: PoolMaster) -> None:
        self.stage = stage
        self.engines = engines
        self.master = master

    async def ask(self, number: int) -> Reply:
        """Ask a prompt, and let the router learn what that did."""
        reply = await self.stage.ask(chat(words(number)))
        assert reply.status == 200
        await self.stage.saved(*self.engines)
        return reply

    async def move(self, number: int, last: Reply) -> Reply:
        """Ask a prompt again while the replica drains that had it last."""
        await self.drain(last.replica, True)
        moved = await self.stage.ask(chat(words(number)))
        await self.drain(last.replica, False)
        assert moved.status == 200
        assert moved.replica != last.replica
        return moved

    async def drain(self, name: str, draining: bool) -> None:
        await self.stage.admin(f"/admin/replicas/{name}/drain", {"draining": draining})

    async def known(self) -> None:
        """Wait until the master's keys are known by name."""
        await self.stage.until(lambda: "tiny" in self.stage.pool.layouts)

    async def is_up(self, wanted: bool) -> None:
        await self.stage.until(lambda: self.stage.pool.is_up is wanted)


@asynccontextmanager
async def pooled(capacity_bytes: int = 1 << 30, **settings: Any) -> AsyncIterator[Pooled]:
    """Run them before a pool that has evicted something: what it holds is verified."""
    defaults = {
        "mooncake__verify_timeout_s": 5.0,
        "health__interval_s": 0.2,
    }
    pool = EmulatedPool(capacity_bytes=capacity_bytes)
    pool.num_evicted = 1
    async with (
        PoolMaster(pool) as master,
        Engines(2, pool=master.url) as engines,
        on_stage(*engines, mooncake__master=master.url, **(defaults | settings)) as stage,
    ):
        await stage.until(lambda: stage.pool.is_up)
        yield Pooled(stage, engines, master)


def pool_tokens(reply: Reply) -> int:
    return int(reply.headers["x-warmroute-cached"].rpartition("pool=")[2])
