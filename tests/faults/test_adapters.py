"""LoRA adapters that are loaded, unloaded and reloaded while requests come."""

from __future__ import annotations

import asyncio

import httpx
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from router.discovery import served_models
from tests.faults.fake_engine import MODELS, FakeEngine
from tests.faults.stage import Engines, Stage, chat, on_stage, words


async def order(engine: Emulator, route: str, **params: object) -> None:
    """Give an engine an order past the router."""
    async with httpx.AsyncClient() as client:
        (await client.post(f"{engine.url}/v1/{route}_lora_adapter", json=params)).raise_for_status()


async def sent(stage: Stage, *engines: Emulator) -> tuple[str, int, int]:
    """Send a request for the adapter: where it went, tokens predicted, tokens reported."""
    reply = await stage.ask(chat(words(1), model="sql"))
    assert reply.status == 200, reply.body
    await stage.knows(*engines)
    return reply.replica, reply.predicted, reply.reported


async def test_an_adapter_loaded_later_is_found_where_it_is() -> None:
    """By the first request for it; reloaded from another path, nothing is left of its blocks."""
    async with Engines(2) as (a, b), on_stage(a, b) as stage:
        assert (await stage.ask(chat(words(1)))).status == 200
        await order(b, "load", lora_name="sql", lora_path="/l/1")

        assert await sent(stage, a, b) == ("r2", 0, 0)
        where, predicted, reported = await sent(stage, a, b)
        assert (where, predicted) == ("r2", reported)
        assert predicted > 0

        params = {"lora_name": "sql", "lora_path": "/l/2", "load_inplace": True}
        reload = {"route": "load_lora_adapter", "params": params, "replicas": ["r2"]}
        assert (await stage.admin("/admin/control", reload)).status == 200
        _, predicted, reported = await sent(stage, a, b)
        assert predicted == reported == 0


async def test_an_adapter_reloaded_at_one_replica_matches_no_blocks_of_another_path() -> None:
    """Those of the replica that has it from the path that names the blocks count."""
    async with Engines(2, loras=(("sql", "/l/1"),)) as (a, b), on_stage(a, b) as stage:
        assert (await stage.ask(chat(words(1), model="sql"))).status == 200
        await stage.knows(a, b)
        await stage.admin(
            "/admin/control",
            {
                "route": "load_lora_adapter",
                "params": {"lora_name": "sql", "lora_path": "/l/2", "load_inplace": True},
                "replicas": ["r2"],
            },
        )
        for name, predicts in (("r1", True), ("r2", False)):
            other = "r2" if name == "r1" else "r1"
            stage.router.fleet.members.drain(other)
            for _ in range(2):
                reply = await stage.ask(chat(words(1), model="sql"))
                await stage.knows(a, b)
                assert reply.replica == name
            assert reply.reported > 0
            assert reply.predicted == (reply.reported if predicts else 0)
            stage.router.fleet.members.drain(other, draining=False)


async def test_an_adapter_unloaded_at_one_replica_is_served_by_another() -> None:
    """No client sees the 404, and the next one is not sent there; unloaded everywhere, all do."""
    async with Engines(2, loras=(("sql", "/l/1"),)) as (a, b), on_stage(a, b) as stage:
        first, *_ = await sent(stage, a, b)
        gone, left = (a, b) if first == "r1" else (b, a)
        await order(gone, "unload", lora_name="sql")

        for _ in range(2):
            where, *_ = await sent(stage, a, b)
            assert where != first
        assert stage.metric("warmroute_failovers_total", reason="adapter_unloaded") == 1
        assert {status.state for status in stage.router.fleet.load.status(0)} == {"up"}

        await order(left, "unload", lora_name="sql")
        for _ in range(2):
            reply = await stage.ask(chat(words(1), model="sql"))
            assert (reply.status, reply.error["param"]) == (404, "model")


async def test_adapters_are_loaded_and_unloaded_by_one_order_to_all() -> None:
    """What failed is named by replica. Models change at once, without waiting for a probe."""

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no room"}}, status=500)

    async def errors(stage: Stage, route: str, **params: str) -> list[str | None]:
        order = {"route": f"{route}_lora_adapter", "params": {"lora_name": "sql", **params}}
        answer = (await stage.admin("/admin/control", order)).json()
        return [each["error"] for each in answer["replicas"]]

    async with (
        Engines(1) as (a,),
        FakeEngine(refuse) as b,
        on_stage(a, b, health__load_interval_s=600) as stage,
    ):
        assert await errors(stage, "load", lora_path="/l/1") == [None, "answered 500"]
        assert b"sql" in (await stage.ask(None, "/v1/models", method="GET")).body
        assert await errors(stage, "unload") == [None, "answered 500"]
        assert b"sql" not in (await stage.ask(None, "/v1/models", method="GET")).body


async def test_unknown_models_make_few_questions() -> None:
    """However many ask for them at once; other base models are another process, which is found."""
    asked = 0

    async def models(request: web.Request) -> web.Response:
        nonlocal asked
        if request.path == "/v1/models":
            asked += 1
            return web.json_response(MODELS)
        return web.json_response({})

    async with FakeEngine(models) as engine:
        del engine.pages["/v1/models"]
        async with on_stage(engine, health__load_interval_s=600) as stage:
            asked = 0
            replies = await asyncio.gather(*(stage.ask(chat("a", model=str(i))) for i in range(40)))

            assert {reply.status for reply in replies} == {404}
            assert 1 <= asked <= 3
            assert served_models.ROUND_S == 1.0
