"""What clients see of replicas that die, hang, fail, and come back. docs/operate/failures.md."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from policies import CandidateId
from router.base.backoff import Suspension
from tests.faults.fake_engine import MODELS, FakeEngine, first_then, streams
from tests.faults.stage import (
    SLOW,
    STUCK,
    Engines,
    RawClient,
    Reply,
    Stage,
    arm,
    chat,
    holder,
    num_running,
    on_stage,
    streamed,
    words,
)

QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.2}


async def warmed(stage: Stage, engines: list[Emulator], number: int = 1) -> Reply:
    """Have one replica hold a prompt."""
    reply = await stage.ask(chat(words(number)))
    await stage.settled(*engines)
    return reply


# -- before the first byte -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["die_before", "kill"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_owner_is_killed_before_the_first_byte(fault: str, stream: bool) -> None:
    """The request moves on to another replica, and its client notices nothing."""
    body = chat(words(1), "ok", words(2))
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await warmed(stage, engines)
        arm(holder(stage, first, engines), fault)
        if fault == "kill":
            await holder(stage, first, engines).serve()
        reply = await stage.ask(streamed(body) if stream else body)

        assert reply.status == 200
        assert reply.replica != first.replica
        assert stage.metric("warmroute_failovers_total", replica=first.replica) == 1
        assert "retried on another replica before the first byte" in stage.log


async def test_the_owner_is_killed_while_requests_wait() -> None:
    """Those that wait for their first byte move on, all of them."""
    sticky = {"policy__name": "session_sticky"}  # all to one
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines, **sticky) as stage:
        async with asyncio.TaskGroup() as tg:
            asked = [tg.create_task(stage.ask(streamed(chat(words(1))))) for _ in range(3)]
            await stage.until(lambda: any(num_running(engine) == 3 for engine in engines))
            owner = next(engine for engine in engines if num_running(engine))
            other = next(engine for engine in engines if engine is not owner)
            other.replica.ranks[0].engine.speed = 1e9
            arm(owner, "kill")

        assert [task.result().status for task in asked] == [200] * 3


@pytest.mark.parametrize("status", [500, 504])
async def test_a_failing_status_moves_on_once(status: int) -> None:
    """Before the first byte; if the others fail as well, the last answer is the client's."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await warmed(stage, engines)
        arm(holder(stage, first, engines), "status", status=status, count=1)
        moved = await stage.ask(chat(words(1)))
        for engine in engines:
            arm(engine, "status", status=status, count=1)
        failed = await stage.ask(chat(words(1)))

        assert moved.status == 200
        assert moved.replica != first.replica
        assert failed.status == status
        assert failed.error["message"] == f"emulated: status {status}"
        assert [engine.replica.faults.num_fired for engine in engines].count(0) == 0


async def test_no_replica_is_tried_twice() -> None:
    """Nor more of them than configured."""
    async with Engines(4) as engines, on_stage(*engines, forward__max_tries=3) as stage:
        for engine in engines:
            arm(engine, "refuse")
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 503
        assert sorted(engine.replica.faults.num_fired for engine in engines) == [0, 1, 1, 1]


async def test_a_client_error_never_counts_and_never_moves_on() -> None:
    """A hundred of them leave the replica in rotation."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        for engine in engines:
            arm(engine, "status", status=400)
        replies = [await stage.ask(chat(words(1))) for _ in range(20)]

        assert {reply.status for reply in replies} == {400}
        assert sum(engine.replica.faults.num_fired for engine in engines) == 20
        assert stage.metric("warmroute_failovers_total") == 0
        assert stage.metric("warmroute_replica_healthy") == 2


# -- after the first byte ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_a_stream_whose_owner_dies_ends_with_an_error_event(path: str) -> None:
    """In the API's own shape, without `[DONE]`; the connection ends cleanly."""
    dies = streams(b'data: {"n":1}\n\n', then="cut", pause_s=0.02)
    body = streamed(chat("a")) | {"prompt": "a"}
    async with FakeEngine(dies) as engine, on_stage(engine) as stage:
        reply = await stage.ask(body, path)

        assert reply.status == 200
        assert reply.events[0] == {"n": 1}
        assert "[DONE]" not in reply.events
        error = reply.events[1]["error"]
        assert "r1 failed" in error["message"]
        if path == "/v1/messages":
            assert b"event: error\ndata:" in reply.body
            assert (reply.events[1]["type"], error["type"]) == ("error", "api_error")
        else:
            assert (error["code"], error["type"]) == (502, "BadGatewayError")
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 1
        assert stage.metric("warmroute_refused_total", code="upstream_broken") == 1


@pytest.mark.parametrize("fault", ["kill", "restart"])
async def test_a_client_learns_of_an_engine_that_dies_in_its_stream(fault: str) -> None:
    """Whatever it was that ended it."""
    async with Engines(1, time_model=SLOW) as (engine,), on_stage(engine) as stage:
        async with stage.asking(
            streamed(chat(words(1), max_tokens=200, ignore_eos=True))
        ) as answer:
            first = await answer.content.readany()
            arm(engine, fault)
            rest = await answer.read()
        events = [line for line in (first + rest).splitlines() if line.startswith(b"data:")]

        assert b"[DONE]" not in rest
        assert "error" in orjson.loads(events[-1][5:])


async def test_an_answer_that_is_no_stream_is_cut() -> None:
    """The client's connection breaks: a whole answer would be a lie."""
    begun = b'{"a":"' + b"x" * (2 << 20)
    dies = streams(begun, then="cut", kind="application/json", pause_s=0.02)

    async with FakeEngine(dies) as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            body = orjson.dumps(chat("a"))
            await client.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )
            head = await client.head()
            try:
                rest = await client.rest()
            except ConnectionResetError:
                rest = b""

        assert b" 200 " in head
        assert not rest.endswith(b"0\r\n\r\n")  # the end of a whole answer
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 1


async def test_a_small_answer_that_breaks_off_moves_on() -> None:
    """What is not a stream reaches the client only when it is whole."""
    dies = streams(b'{"a":', then="cut", kind="application/json", pause_s=0.02)
    dies_once = first_then(dies, streams(b'{"a":', b"1}", kind="application/json"))

    async with FakeEngine(dies_once) as a, FakeEngine(dies_once) as b, on_stage(a, b) as stage:
        reply = await stage.ask(chat("a"))

        assert (reply.status, reply.json()) == (200, {"a": 1})
        assert stage.metric("warmroute_failovers_total", reason="upstream_broken") == 1


# -- silence -------------------------------------------------------------------------------------


async def test_a_hung_replica_is_noticed_and_left() -> None:
    """A probe finds it; those that wait for their first byte there move on at once."""
    hung: list[FakeEngine] = []

    async def hangs_at_first(request: web.Request) -> web.StreamResponse:
        if not hung:
            hung.append(a if request.host == a.url.removeprefix("http://") else b)
            hung[0].hangs = True
            await asyncio.Event().wait()
        return web.json_response({})

    async with (
        FakeEngine(hangs_at_first) as a,
        FakeEngine(hangs_at_first) as b,
        on_stage(a, b, **QUICK) as stage,
    ):
        reply = await stage.ask(chat("a"))

        assert reply.status == 200
        assert stage.metric("warmroute_failovers_total", reason="upstream_timeout") == 1
        assert stage.metric("warmroute_replica_healthy") == 1
        assert hung[0].left.is_set()
        hung[0].hangs = False
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 2)


async def test_no_request_waits_for_a_replica_that_is_not_found_again() -> None:
    """It was down, answers probes again, but does not say what it serves: others are asked."""

    async def hangs_at_first(request: web.Request) -> web.StreamResponse:
        if stage.metric("warmroute_failovers_total") == 0:  # it may move before it is here
            await asyncio.Event().wait()
        return web.json_response({})

    async with (
        FakeEngine(hangs_at_first) as a,
        FakeEngine(hangs_at_first) as b,
        on_stage(a, b, **QUICK) as stage,
    ):
        for engine in (a, b):
            engine.pages["/health"] = engine.pages["/v1/models"] = (500, "")
        await stage.until(lambda: stage.log.count("replica down") == 4)  # each is logged twice
        for engine in (a, b):
            engine.pages["/health"] = (200, "")
        await stage.until(lambda: stage.log.count("replica not usable yet") == 4)
        reply = await stage.ask(chat("a"))

        assert reply.status == 200
        assert stage.metric("warmroute_failovers_total") == 1
        for engine in (a, b):
            engine.pages["/v1/models"] = MODELS
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 2)


async def test_a_first_byte_that_does_not_come_moves_on() -> None:
    """Also where probes are answered: each phase has its own deadline."""
    async with (
        Engines(2) as engines,
        on_stage(*engines, forward__first_byte_timeout_s=1.0) as stage,
    ):
        first = await warmed(stage, engines)
        arm(holder(stage, first, engines), "hang", count=1)
        moved = await stage.ask(chat(words(1)))
        for engine in engines:
            arm(engine, "hang", count=1)
        failed = await stage.ask(chat(words(1)))

        assert moved.status == 200
        assert (failed.status, failed.error["type"]) == (504, "BadGatewayError")
        await stage.until(lambda: not any(map(num_running, engines)))


# -- no replica left, and coming back ------------------------------------------------------------


async def test_all_replicas_down_is_a_503_that_says_when_to_come_back() -> None:
    """From the first request on, in the API's shape, on every route."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        for engine in engines:
            arm(engine, "kill")
            await engine.serve()
        replies = [await stage.ask(chat(words(1))) for _ in range(3)]
        replies.append(await stage.ask(None, "/v1/responses/r", method="GET"))
        replies.append(await stage.ask({"model": "tiny"}, "/v1/messages"))
        health = await stage.ask(None, "/healthz", method="GET")

        assert [reply.status for reply in replies] == [503] * 5
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies)
        assert replies[0].error["type"] == "ServiceUnavailableError"
        assert replies[4].json()["error"]["type"] == "overloaded_error"
        assert health.status == 200
        assert stage.metric("warmroute_refused_total", code="no_replica_available") == 5


async def test_the_breaker_opens_and_one_request_tries() -> None:
    """Failing requests take a replica out; after a pause one is sent there, and it is back."""
    by_turns = {"policy__name": "round_robin", "health__interval_s": 60.0}
    async with Engines(2) as engines, on_stage(*engines, **by_turns) as stage:
        health = stage.router.fleet.members.states[CandidateId("r1")].health
        health._suspension = pause = Suspension(3_600.0, 3_600.0)
        arm(engines[0], "status", status=500, count=3)
        for number in range(6):
            assert (await stage.ask(chat(words(number)))).status == 200

        assert stage.metric("warmroute_failovers_total", replica="r1") == 3
        assert stage.metric("warmroute_replica_healthy", replica="r1") == 0
        for number in range(4):
            assert (await stage.ask(chat(words(number)))).replica == "r2"
        pause.until_s = 0.0
        await stage.until(lambda: stage.metric("warmroute_replica_healthy", replica="r1"))
        names = {(await stage.ask(chat(words(number)))).replica for number in range(4)}
        assert names == {"r1", "r2"}


async def test_the_only_replica_is_asked_although_it_fails() -> None:
    """There is no other: clients get its own errors, and it is back with its first success."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        arm(engine, "status", status=500, count=8)
        statuses = [(await stage.ask(chat(words(1)))).status for _ in range(10)]

        assert statuses == [500] * 8 + [200] * 2


@pytest.mark.parametrize("down_s", [0.0, 0.3])
async def test_a_restarted_replica_gets_no_credit_for_its_past(down_s: float) -> None:
    """Its events are followed anew: EXACT again, and predictions right from the first one on."""
    by_turns = QUICK | {"policy__name": "round_robin"}
    async with Engines(2) as engines, on_stage(*engines, **by_turns) as stage:
        for number in range(6):
            await warmed(stage, engines, number)
        for engine in engines:
            engine.changed.clear()
            arm(engine, "restart", down_s=down_s)
            await engine.changed.wait()
        await stage.until(lambda: stage.metric("warmroute_index_blocks") == 0)
        await stage.settled(*engines)
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 2)
        for number in (0, 1, 0, 1, 2, 3):  # 0 and 1 come back to where they are
            reply = await stage.ask(chat(words(number)))
            await stage.settled(*engines)

            assert reply.status == 200
            assert reply.predicted == reply.reported
        await stage.until(lambda: stage.metric("warmroute_replica_state", state="exact") == 2)
