"""What a router and its clients say where something is set up wrongly."""

from __future__ import annotations

import pytest

from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, chat, on_stage
from tests.ports import free_port

QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.2}


# -- no replica ----------------------------------------------------------------------------------


async def test_a_request_is_told_which_replicas_have_not_answered_and_why() -> None:
    """Not that there are none; and no address of theirs."""
    async with FakeEngine() as other:
        other.pages["/v1/models"] = (200, "<html>")
        urls = [f"http://127.0.0.1:{free_port()}", other.url, "http://engine.invalid:8000"]
        async with on_stage(*urls, ready=False) as stage:
            await stage.until(lambda: stage.log.count("replica not usable yet") >= 3)
            refused = await stage.ask(chat("a"))
            models = await stage.ask(None, "/v1/models", method="GET")

    for reply in (refused, models):
        assert reply.status == 503
        said = reply.error["message"]
        assert said.startswith("No replica has answered yet: r1 (refused the connection), r2 (")
        assert "r2 (answered 200 without a model list: not an OpenAI-compatible server?" in said
        assert "r3 (its host name does not resolve" in said
        assert "http://" not in said


async def test_a_router_without_replicas_says_so() -> None:
    async with on_stage(ready=False, admin__allow_empty=True) as stage:
        reply = await stage.ask(chat("a"))

    assert (reply.status, reply.error["message"]) == (503, "No replica is configured.")


async def test_a_model_that_is_not_there_may_be_one_that_has_not_answered() -> None:
    async with Engines(1) as (engine,):
        async with on_stage(engine, f"http://127.0.0.1:{free_port()}") as stage:
            await stage.until(lambda: "replica not usable yet" in stage.log)
            reply = await stage.ask(chat("a", model="other"))

    assert reply.status == 503
    assert "(served: tiny; not answered yet: r2 (refused the connection))" in str(reply.error)


async def test_a_request_is_told_how_all_replicas_are() -> None:
    async with Engines(2) as (first, second), on_stage(first, second, **QUICK) as stage:
        await stage.admin("/admin/replicas/r1/drain", {"draining": True})
        await second._close()
        await stage.until(lambda: "replica down" in stage.log)
        reply = await stage.ask(chat("a"))

        assert reply.status == 503
        assert reply.error["message"] == (
            "No replica of `tiny` can take a request now (r1: draining, r2: down (probe refused))."
        )


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
async def test_a_base_url_may_end_as_clients_write_it(suffix: str) -> None:
    async with Engines(1) as (engine,), on_stage(engine.url + suffix) as stage:
        listed = (await stage.admin("/admin/replicas")).json()["replicas"]

        assert (await stage.ask(chat("a"))).status == 200
        assert listed[0]["url"] == engine.url
