"""router.pool.leader and its follower: several masters of one pool, of which one serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest.emulator.pool import PoolMaster
from router.base.errors import PoolError, PoolGone
from router.pool.leader import find_leader
from router.pool.master import MasterApi


@asynccontextmanager
async def group(*states: str) -> AsyncIterator[tuple[MasterApi, PoolMaster, PoolMaster]]:
    """Create two masters with these states."""
    async with PoolMaster() as one, PoolMaster() as two:
        one.ha_status, two.ha_status = states
        async with MasterApi(f"{one.url}, {two.url}/", timeout_s=10.0) as api:
            yield api, one, two


async def test_the_master_that_serves_is_asked() -> None:
    """While it serves, the others are left alone."""
    async with group("standby", "serving") as (api, one, two):
        assert await find_leader(api) is False  # the first to be found is no change
        assert api.url == two.url
        assert await find_leader(api) is False
        assert (one.num_asked["/ha_status"], two.num_asked["/ha_status"]) == (1, 2)

        one.ha_status, two.ha_status = "serving", "standby"
        assert await find_leader(api) is True
        assert api.url == one.url


@pytest.mark.parametrize("state", ["standby", "candidate", "recovering", "", "x" * 1000])
async def test_without_a_leader_the_pool_is_gone(state: str) -> None:
    """The error has each master's state."""
    async with group(state, "standby") as (api, one, two):
        await two.stop()
        with pytest.raises(PoolGone, match="does not listen") as caught:
            await find_leader(api)

        assert f"{one.url} {state[:64]}" in caught.value.message


async def test_masters_that_both_serve_are_refused() -> None:
    """They are two pools, or an election is under way."""
    async with group("serving", "serving") as (api, one, two):
        with pytest.raises(PoolError, match="they are two pools") as caught:
            await find_leader(api)

        assert one.url in caught.value.message
        assert two.url in caught.value.message


async def test_a_standby_alone_is_reported_as_one() -> None:
    """Its figures look like those of an empty pool, but it refuses to list keys."""
    async with PoolMaster() as one:
        one.ha_status = "standby"
        async with MasterApi(one.url) as api:
            assert (await api.figures()).num_keys == 0
            with pytest.raises(PoolError, match="answered 503, as a standby does"):
                await api.list_keys(lambda keys: None)
