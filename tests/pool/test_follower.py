"""router.pool.follower: the master's answers fill the directories; its failures are survived."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from router.config import MooncakeConfig
from router.metrics import Metrics
from router.pool.follower import PoolFollower
from router.pool.master import MasterApi
from tests.pool.samples import a_pool, chain, names
from tests.samples import Clock


class Rig:
    """A follower of one master, run step by step."""

    def __init__(self, master: PoolMaster, api: MasterApi, config: MooncakeConfig) -> None:
        self.master = master
        self.api = api
        self.clock = Clock()
        self.metrics = Metrics()
        self.pool = a_pool()
        self.pool.lost("not asked yet")
        self.follower = PoolFollower(self.pool, api, config, self.metrics, clock=self.clock)

    async def step(self, after_s: float = 1.0) -> None:
        self.clock.now_s += after_s
        await self.follower.step()

    def held(self, *numbers: int) -> int:
        return self.pool.match("tiny", chain(*numbers))

    def num_listings(self) -> int:
        return self.master.num_asked.get("/get_all_keys", 0)

    def failures(self, code: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "warmroute_pool_failures_total", {"pool": "", "code": code}
        )
        return value or 0.0


@asynccontextmanager
async def rigged(*, timeout_s: float = 10.0, **fields: float) -> AsyncIterator[Rig]:
    async with PoolMaster(EmulatedPool(capacity_bytes=16_384 * 8)) as master:
        config = MooncakeConfig(master=master.url, **fields)
        async with MasterApi(master.url, timeout_s=timeout_s) as api:
            yield Rig(master, api, config)


async def test_the_pool_is_listed_at_the_start_and_then_every_list_s() -> None:
    async with rigged(list_s=10) as rig:
        rig.master.pool.put(names(1, 2))
        assert rig.held(1, 2) == 0
        await rig.step()
        assert rig.held(1, 2) == 2
        for _ in range(5):
            await rig.step()
        assert rig.num_listings() == 1
        await rig.step(after_s=10)
        assert rig.num_listings() == 2
        assert rig.pool.listed_s == rig.clock.now_s
        assert rig.pool.bytes_per_block("tiny") == 16_384


async def test_an_eviction_is_a_reason_to_list() -> None:
    """The master's counters show that there was one, but not which block it was."""
    async with rigged() as rig:
        rig.master.pool.put(names(*range(1, 9)))
        await rig.step()
        assert rig.held(*range(1, 9)) == 8

        rig.master.pool.put(names(20))
        await rig.step()
        assert rig.held(*range(1, 9)) == 0  # the first of them went
        rig.master.pool.remove(names(20))
        await rig.step()
        assert rig.held(20) == 0


async def test_objects_that_no_event_reported_are_a_reason_to_list() -> None:
    """Engines with a MultiConnector report no stored blocks."""
    async with rigged() as rig:
        rig.master.pool.put(names(1))
        await rig.step()
        assert rig.held(1, 2) == 1

        rig.master.pool.put(names(2))
        await rig.step()
        assert rig.held(1, 2) == 2
        assert rig.num_listings() == 2

        rig.master.pool.put(names(3))
        rig.pool.stored("tiny", chain(3), replica="r1")
        await rig.step()
        await rig.step()
        assert rig.held(1, 2, 3) == 3
        assert rig.num_listings() == 2


async def test_listings_take_a_small_part_of_the_time_however_often_they_are_wanted() -> None:
    async with rigged() as rig:
        await rig.step()
        assert rig.num_listings() == 1
        rig.follower.list_again_s = rig.clock.now_s + 19.0  # as after one that took a second
        rig.pool.wants_listing = True
        await rig.step(after_s=10)
        assert rig.num_listings() == 1
        await rig.step(after_s=10)
        assert rig.num_listings() == 2


async def test_a_restarted_master_empties_the_directories() -> None:
    """Its counters are smaller than before."""
    async with rigged() as rig:
        rig.master.pool.put(names(1, 2, 3))
        await rig.step()
        rig.master.pool.restart()
        rig.master.pool.put(names(1))
        await rig.step()

        assert rig.pool.counters.num_restarts == 1
        assert rig.held(1, 2, 3) == 1


async def test_an_emptied_pool_is_listed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that sleeps has all objects removed. Most disappear without an eviction."""
    async with rigged() as rig:
        rig.master.pool.put(names(1, 2, 3))
        await rig.step()
        assert rig.held(1, 2, 3) == 3
        rig.master.pool.clear()
        rig.master.pool.put(names(2))
        await rig.step(after_s=0.001)

        assert rig.num_listings() == 2
        assert (rig.held(1), rig.held(2)) == (0, 1)
        assert rig.pool.counters.num_emptied == 1
        assert "the Mooncake pool was emptied" in caplog.text
        rig.master.pool.put(names(*range(3, 12)))  # more than there is room for
        await rig.step()
        assert rig.pool.counters.num_emptied == 1


@pytest.mark.parametrize("fault", ["garbage", "error", "half", "hang"])
async def test_the_second_failure_of_a_master_makes_its_pool_not_count(fault: str) -> None:
    """Its blocks stay known for its return."""
    async with rigged(timeout_s=1.0 if fault == "hang" else 10.0) as rig:
        rig.master.pool.put(names(1, 2))
        await rig.step()
        rig.master.fault = fault  # type: ignore[assignment]
        await rig.step()
        assert rig.held(1, 2) == 2
        await rig.step()
        assert rig.held(1, 2) == 0
        assert rig.failures("pool_error") == 2
        rig.master.fault = "none"
        await rig.step()
        assert rig.held(1, 2) == 2


async def test_an_incomplete_listing_changes_nothing_and_is_tried_again() -> None:
    async with rigged(list_s=1) as rig:
        rig.master.pool.put(names(1, 2, 3))
        await rig.step()

        async def breaks_off(take: object) -> int:
            rig.master.fault = "half"
            return await MasterApi.list_keys(rig.api, take)  # type: ignore[arg-type]

        rig.api.list_keys = breaks_off  # type: ignore[method-assign]
        await rig.step(after_s=60)
        assert rig.held(1, 2, 3) == 3
        assert rig.pool.wants_listing
        assert rig.pool.counters.num_listings == 1


async def test_only_one_of_several_routers_lists() -> None:
    """The others list once, to learn the layout; then they learn from other routers."""
    async with rigged() as rig:
        rig.follower.is_lister = False
        rig.pool.directory("tiny").stored(chain(1))
        rig.master.pool.put(names(1))
        await rig.step()
        rig.master.pool.put(names(2))
        await rig.step()
        rig.master.pool.restart()
        await rig.step()

        assert rig.num_listings() == 1
        assert rig.held(1) == 1
