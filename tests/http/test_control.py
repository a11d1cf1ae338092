"""router.http.admin: orders to engines, through the admin port alone."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from router.cli import main
from tests.faults.fake_engine import FakeEngine, hang_up
from tests.faults.stage import Json, on_stage


async def _does(_: web.Request) -> web.Response:
    return web.json_response({"success": True})


async def _does_not(_: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/sleep"})


async def _breaks(request: web.Request) -> web.Response:
    hang_up(request)
    return web.Response()


async def test_an_order_goes_to_all_replicas() -> None:
    """Each one's answer is shown, also where it is a redirect or none at all."""
    order = {"route": "reset_prefix_cache", "params": {"reset_external": True}}
    async with FakeEngine(_does) as a, FakeEngine(_does_not) as b, FakeEngine(_breaks) as c:
        async with on_stage(a, b, c) as stage:
            reply = await stage.admin("/admin/control", order)

        assert reply.status == 200
        first, second, third = reply.json()["replicas"]
        assert first == {"name": "r1", "status": 200, "answer": {"success": True}, "error": None}
        assert (second["status"], second["error"]) == (307, "answered 307")
        assert third["status"] is None
        assert "closed the connection without an answer" in third["error"]
        for engine in (a, b, c):
            (received,) = engine.received
            assert received.method == "POST"
            assert received.target == "/reset_prefix_cache?reset_external=true"


async def test_an_order_goes_to_those_that_are_named() -> None:
    """Only there; bodies where the engine wants bodies, lists as it wants lists."""
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        for order in (
            {"route": "is_sleeping", "replicas": ["r2"]},
            {"route": "wake_up", "params": {"tags": ["weights", "kv"]}, "replicas": ["r2", "r2"]},
            {"route": "unload_lora_adapter", "params": {"lora_name": "x"}, "replicas": ["r2"]},
            {"route": "update_weights", "params": {"update_info": {"a": 1}}, "replicas": ["r2"]},
        ):
            assert (await stage.admin("/admin/control", order)).status == 200

        assert a.received == []
        assert [(r.method, r.target, r.body) for r in b.received] == [
            ("GET", "/is_sleeping", b""),
            ("POST", "/wake_up?tags=weights&tags=kv", b""),
            ("POST", "/v1/unload_lora_adapter", b'{"lora_name":"x"}'),
            ("POST", "/update_weights", b'{"update_info":{"a":1}}'),
        ]


@pytest.mark.parametrize(
    ("order", "status", "said"),
    [
        ({"route": "collective_rpc"}, 400, "must be one of is_sleeping"),
        ({"route": "../sleep"}, 400, "must be one of"),
        ({"route": "sleep", "replicas": ["r9"]}, 404, "known: r1"),
        ({"route": "sleep", "replicas": []}, 400, "length >= 1"),
        ({"route": "sleep", "url": "http://x"}, 400, "unknown field"),
        ({}, 400, "route"),
    ],
)
async def test_a_wrong_order_reaches_no_engine(order: Json, status: int, said: str) -> None:
    """The message says what there is."""
    async with FakeEngine(_does) as engine, on_stage(engine) as stage:
        reply = await stage.admin("/admin/control", order)

        assert reply.status == status
        assert said in reply.error["message"]
        assert engine.received == []


async def test_the_command_line_gives_orders() -> None:
    """It shows each answer, and fails if one of them is a failure."""

    async def level_1_only(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.query.get("level") == "1" else 400)

    async with FakeEngine(level_1_only) as a, FakeEngine(level_1_only) as b:
        async with on_stage(a, b) as stage:

            async def run(*args: str) -> Result:
                options = ["engine", "--admin", stage.admin_url, *args]
                return await asyncio.to_thread(CliRunner().invoke, main, options)

            done = await run("sleep", "level=1", "--all")
            failed = await run("sleep", "level=2", "--replica", "r2", "--json")
            nonsense = await run("sleep", "level", "--all")

    assert (done.exit_code, done.output) == (0, "r1: 200 {}\nr2: 200 {}\n")
    assert failed.exit_code == 1
    assert orjson.loads(failed.output)["replicas"][0]["error"] == "answered 400"
    assert nonsense.exit_code == 2
    assert len(a.received) == 1
