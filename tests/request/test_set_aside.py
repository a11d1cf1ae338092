"""Replicas of vLLM 0.33 that answer 503 though they are well: paused, or scaled by elastic EP."""

from __future__ import annotations

import pytest
from aiohttp import web

from router.discovery import sleep
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage, words

PAUSED = {"error": {"message": "Generation is paused. Please retry after it resumes.", "code": 503}}
SCALING = {"error": "The model is currently scaling. Please try again later."}
RETIRED = {"error": "This data-parallel rank has been retired and is awaiting shutdown."}
QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}
METRICS = "process_start_time_seconds 1.0\n"


def refusing(body: object) -> FakeEngine:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response(body, status=503)

    return FakeEngine(refuse)


@pytest.mark.parametrize("body", [PAUSED, SCALING, RETIRED], ids=["paused", "scaling", "retired"])
async def test_one_that_says_so_is_left_out_and_not_to_blame(body: object) -> None:
    """The first request moves on, the others do not try; nothing counts as a failure."""
    async with refusing(body) as one, FakeEngine() as two:
        async with on_stage(one, two, policy__name="round_robin") as stage:
            replies = [await stage.ask(chat(words(number))) for number in range(8)]

            assert {reply.status for reply in replies} == {200}
            assert len(one.received) == 1
            assert len(two.received) == 8
            (name,) = [r.name for r in stage.router.fleet.members.replicas if r.url == one.url]
            assert stage.router.fleet.members.replica(name).paused
            assert stage.metric("warmroute_replica_failures_total", replica=name) in (0, None)
            assert "replica is paused: it gets no requests" in stage.log


async def test_another_503_is_a_failure_as_before() -> None:
    """An engine that is overloaded, or a proxy in front of it, is tried again."""
    async with refusing({"error": {"message": "busy", "code": 503}}) as one, FakeEngine() as two:
        async with on_stage(one, two, policy__name="round_robin") as stage:
            await stage.ask(chat(words(1)))
            await stage.ask(chat(words(2)))

            assert not any(replica.paused for replica in stage.router.fleet.members.replicas)


async def test_its_metrics_say_when_it_goes_on() -> None:
    """While it scales they are 503, too."""
    async with refusing(SCALING) as one, on_stage(one, **QUICK) as stage:
        first = await stage.ask(chat(words(1)))
        assert stage.router.fleet.members.replica("r1").paused
        one.on_request = FakeEngine().on_request
        one.pages["/metrics"] = (200, METRICS)
        await stage.until(lambda: not stage.router.fleet.members.replica("r1").paused)
        again = await stage.ask(chat(words(1)))

        assert (first.status, again.status) == (503, 200)


async def test_without_metrics_it_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not left out for ever."""
    monkeypatch.setattr(sleep, "ASIDE_S", 0.1)
    async with refusing(PAUSED) as one, on_stage(one, **QUICK) as stage:
        await stage.ask(chat(words(1)))
        assert stage.router.fleet.members.replica("r1").paused

        await stage.until(lambda: not stage.router.fleet.members.replica("r1").paused)
