"""`warmroute engine`: an order says where it goes."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.cli.running import beside
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, on_stage


async def _does(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize(
    "route",
    ["sleep", "pause", "release_kv_cache_memory", "reset_prefix_cache", "reset_mm_cache",
     "reset_encoder_cache", "wake_up", "resume", "start_profile", "unload_lora_adapter"],
)  # fmt: skip
async def test_an_order_for_nobody_in_particular_reaches_no_engine(route: str) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", route)
        both = await beside(stage, "engine", route, "--all", "--replica", "r1")

        assert (a.received, b.received) == ([], [])
    assert (result.exit_code, both.exit_code) == (2, 2)
    assert f"say where: {route} --replica NAME" in result.stderr
    assert "--all" in result.stderr
    assert "not both" in both.stderr


@pytest.mark.parametrize(("where", "sent"), [(("--all",), (1, 1)), (("--replica", "r2"), (0, 1))])
async def test_an_order_goes_where_it_says(where: tuple[str, ...], sent: tuple[int, int]) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", "sleep", "level=1", *where)

        assert (len(a.received), len(b.received)) == sent
    assert result.exit_code == 0


async def test_a_question_may_go_to_all() -> None:
    """It changes nothing."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        result = await beside(stage, "engine", "is_sleeping")

    assert result.stdout.count('{"is_sleeping": false}') == 2
