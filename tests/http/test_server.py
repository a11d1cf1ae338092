"""router.http.server and its connections, on raw sockets: limits, time-outs, what is not HTTP."""

from __future__ import annotations

import asyncio

import orjson

from router.http.connection import Connection
from tests.faults.stage import (
    SLOW,
    STUCK,
    Engines,
    RawClient,
    Stage,
    chat,
    num_running,
    on_stage,
    streamed,
    words,
)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
LONG = {"max_tokens": 2000, "ignore_eos": True}


def posted(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def ready(stage: Stage) -> int:
    return (await stage.ask(None, "/readyz", method="GET")).status


def connections(stage: Stage) -> list[Connection]:
    return list(stage.router.listeners[0]._connections)


# -- the end of a router -------------------------------------------------------------------------


async def test_a_router_that_ends_is_not_ready_first_and_serves_on() -> None:
    """New connections, and old ones: each answer is then its connection's last."""
    async with Engines(1) as (engine,):
        async with on_stage(engine, listen__drain_grace_s=60.0) as stage:
            async with RawClient.connected(stage.url) as client:
                await client.send(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
                assert await client.status() == 200
                stage.stop.set()
                await stage.until(lambda: stage.router.draining.reason)

                assert await ready(stage) == 503
                served = await stage.ask(chat(words(1)))
                assert (served.status, served.headers["Connection"]) == (200, "close")
                body = orjson.dumps(chat(words(1)))
                await client.send(posted(body))
                head = await client.head()
                assert b" 200 " in head
                assert b"Connection: close" in head
                await client.rest()
            stage.router.draining.end_now()


async def test_streams_end_before_the_router_does() -> None:
    """Nothing new is accepted meanwhile; an idle connection is closed."""
    async with Engines(1, time_model=SLOW) as (engine,):
        async with on_stage(engine, is_idle=False) as stage:
            async with RawClient.connected(stage.url) as idle, asyncio.TaskGroup() as tg:
                await idle.send(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
                assert await idle.status() == 200
                body = streamed(chat(words(1), max_tokens=50, ignore_eos=True))
                asked = tg.create_task(stage.ask(body))
                await stage.until(lambda: num_running(engine))
                stage.stop.set()
                assert await idle.rest() == b""
                try:
                    await asyncio.open_connection("127.0.0.1", int(stage.url.rpartition(":")[2]))
                except ConnectionRefusedError:
                    refused = True

    assert refused
    assert asked.result().events[-1] == "[DONE]"


async def test_what_is_cut_at_the_end_is_told() -> None:
    """A stream by an error event, a whole answer by a 503, as soon as `drain_s` is over."""
    async with Engines(2, time_model=SLOW) as engines:
        async with on_stage(*engines, listen__drain_s=0.1, is_idle=False) as stage:
            async with asyncio.TaskGroup() as tg:
                stream = tg.create_task(stage.ask(streamed(chat(words(1), **LONG))))
                whole = tg.create_task(stage.ask(chat(words(2), **LONG)))
                await stage.until(lambda: sum(map(num_running, engines)) == 2)
                stage.stop.set()

    assert stream.result().status == 200
    assert stream.result().events[-1]["error"]["code"] == 503
    assert whole.result().status == 503
    assert whole.result().headers["Retry-After"] == "1"
    assert whole.result().error["type"] == "ServiceUnavailableError"
    assert not any(map(num_running, engines))


async def test_a_second_signal_ends_at_once() -> None:
    """Whatever phase it is in; what is cut is told all the same."""
    async with Engines(1, time_model=STUCK) as (engine,):
        async with on_stage(engine, listen__drain_s=600.0, is_idle=False) as stage:
            async with asyncio.TaskGroup() as tg:
                whole = tg.create_task(stage.ask(chat(words(1))))
                await stage.until(lambda: num_running(engine))
                stage.stop.set()
                await stage.until(lambda: stage.router.draining.reason)
                stage.router.draining.end_now()

    assert whole.result().status == 503


async def test_a_body_that_arrives_during_the_drain_is_answered() -> None:
    """The request was there before the end began: its other half is read."""
    body = orjson.dumps(chat(words(1)))
    async with Engines(1) as (engine,), on_stage(engine, is_idle=False) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(posted(body)[:-20])
            await stage.until(lambda: stage.metric("warmroute_connections") == 1)
            await stage.until(lambda: not any(c.is_idle for c in connections(stage)))
            stage.stop.set()
            await stage.until(lambda: stage.router.draining.reason)
            await client.send(body[-20:])
            assert b" 200 " in await client.head()
            await client.rest()
