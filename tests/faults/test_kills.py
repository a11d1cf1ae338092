"""Requests that end replicas: they are recognised, and sent no more. docs/operate/failures.md."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from tests.faults.fake_engine import FakeEngine, hang_up
from tests.faults.stage import (
    SECRET,
    SLOW,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    words,
)
from tests.faults.tenants import A, B, tenants_file

POISON = f"{SECRET} the poisoned prompt"
CHAT = "/v1/chat/completions"
REFUSED = "request_kills_replicas"
QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.2}

PATHS = {
    CHAT: chat(POISON),
    "/v1/completions": {"model": "tiny", "prompt": POISON, "max_tokens": 4},
    "/v1/messages": chat(POISON),
    "/v1/responses": {"model": "tiny", "input": POISON, "store": False},
}


def poison(engines: Sequence[Emulator], text: str = POISON) -> None:
    """Have a text end every engine that it gets to."""
    for engine in engines:
        arm(engine, "kill_before", text=text)


def num_dead(engines: Sequence[Emulator]) -> int:
    return sum(engine.is_dead for engine in engines)


def sdk(stage: Stage, **options: Any) -> openai.AsyncOpenAI:
    """Return OpenAI's client with its default retries."""
    return openai.AsyncOpenAI(base_url=stage.url + "/v1", api_key=SECRET, **options)


async def ask_twice(stage: Stage, body: Json, path: str = CHAT, **options: Any) -> list[Reply]:
    """Ask until two replicas are dead, and once more when the router has seen that.

    A client that sends its request again does so half a second later, a probe takes a millisecond.
    """
    replies = [await stage.ask(body, path, **options)]
    await stage.until(lambda: stage.router.deaths.num_suspects == 2)
    return [*replies, await stage.ask(body, path, **options)]


async def test_a_prompt_that_kills_ends_two_of_six_replicas() -> None:
    """The SDK's own retries, and the agent that asks again: four replicas go on."""
    async with Engines(6) as engines, on_stage(*engines) as stage:
        poison(engines)
        async with sdk(stage) as client:
            for _ in range(3):
                with pytest.raises(openai.UnprocessableEntityError) as caught:
                    await client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": POISON}]
                    )

            assert num_dead(engines) == 2
            assert caught.value.type == REFUSED
            assert "2 replicas went down while processing this request" in str(caught.value)
            assert caught.value.response.headers["x-should-retry"] == "false"
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "another"}]
            )
            assert answer.choices[0].message.content
        assert stage.metric("warmroute_refused_total", code=REFUSED) == 3
        assert stage.log.count("request refused from now on") == 2  # in text, and as JSON


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_says_so_in_its_own_shape(path: str) -> None:
    async with Engines(4) as engines, on_stage(*engines) as stage:
        poison(engines)
        body = PATHS[path] | {"stream": True}
        broken, refused = await ask_twice(stage, body, path)

        assert num_dead(engines) == 2
        assert broken.status == 502
        assert refused.status == 422
        wanted = "invalid_request_error" if path == "/v1/messages" else REFUSED
        assert refused.error["type"] == wanted
        assert "went down" in refused.error["message"]


async def test_innocent_requests_at_the_same_replicas_are_answered() -> None:
    """They are in flight wherever the prompt kills, and none of them is refused."""
    async with (
        Engines(6, time_model=SLOW, reply_tokens=10) as engines,
        on_stage(*engines, policy__name="round_robin") as stage,
        sdk(stage) as client,
    ):
        poison(engines)
        for engine in engines:
            arm(engine, "slow", factor=25.0)  # until they are there: on a busy machine that takes

        async def ask(text: str) -> str | None:
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}]
            )
            return answer.choices[0].message.content

        async with asyncio.TaskGroup() as tg:
            innocent = [tg.create_task(ask(words(number))) for number in range(30)]
            await stage.until(lambda: sum(map(num_running, engines)) >= 20)
            for engine in engines:
                arm(engine, "slow", factor=1.0)
            with pytest.raises(openai.APIStatusError):
                await ask(POISON)

        assert all(task.result() for task in innocent)
        with pytest.raises(openai.UnprocessableEntityError):
            await ask(POISON)
        assert num_dead(engines) <= 3
        assert stage.log.count("request refused from now on") == 2  # one, in both forms


async def test_one_death_refuses_nothing() -> None:
    """A replica that dies by chance takes a request with it, which is answered elsewhere."""
    async with Engines(3) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        arm(engines[0], "kill_before", text=POISON)
        for _ in range(6):
            assert (await stage.ask(chat(POISON))).status == 200
        assert num_dead(engines) == 1
        assert not stage.router.deaths.num_suspects  # it was answered


async def test_a_broken_connection_is_no_death() -> None:
    """The replica is there: whatever it failed at, the request may be sent again."""
    async with Engines(3) as engines, on_stage(*engines) as stage:
        for engine in engines:
            arm(engine, "die_before", text=POISON)
        replies = [await stage.ask(chat(POISON)) for _ in range(4)]

        assert {reply.status for reply in replies} == {502}
        assert not stage.router.deaths.num_suspects


def mortal(kind: str) -> FakeEngine:
    """Make an engine that a request ends: it breaks off, or fails it as vLLM does, and is dead.

    Its process may live on for some seconds; `/health` says 503 by then. Or it hangs.
    """
    engine = FakeEngine()

    async def die(request: web.Request) -> web.StreamResponse:
        if kind == "hangs":
            engine.hangs = True
            await asyncio.Event().wait()
        engine.pages["/health"] = (503, "")
        if kind == "fails":
            return web.Response(status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if kind != "breaks off":
            await response.prepare(request)
            await response.write(b'data: {"type": "content"}\n\n')
            await asyncio.sleep(0.01)
        if kind == "fails inside its answer":
            error = {"error": {"message": "EngineDeadError", "code": 500}}
            await response.write(b"data: " + orjson.dumps(error) + b"\n\ndata: [DONE]\n\n")
        else:
            hang_up(request)
        return response

    engine.on_request = die
    return engine


async def test_no_request_waits_for_the_probe_of_a_replica_that_broke_off() -> None:
    """It is answered elsewhere while the probe hangs."""
    broken = FakeEngine()

    async def break_off(request: web.Request) -> web.StreamResponse:
        broken.hangs = True
        hang_up(request)
        raise AssertionError

    broken.on_request = break_off
    settings = {"policy__name": "round_robin", "health__timeout_s": 30.0}
    async with broken, FakeEngine() as other, on_stage(broken, other, **settings) as stage:
        while not broken.received:
            reply = await stage.ask(chat(POISON))

        assert reply.status == 200
        assert other.received
        assert not broken.left.is_set()
        broken.hangs = False


KINDS = ["breaks off", "fails", "breaks off inside its answer", "fails inside its answer"]


@pytest.mark.parametrize("kind", KINDS)
async def test_deaths_of_every_kind_count(kind: str) -> None:
    """Before the first byte and after it; with an error of the engine's own, and without."""
    engines = [mortal(kind) for _ in range(4)]
    async with engines[0], engines[1], engines[2], engines[3], on_stage(*engines) as stage:
        body: Json = {"model": "tiny", "input": POISON, "stream": "inside" in kind}
        await stage.ask(body, "/v1/responses")
        await stage.until(lambda: stage.router.deaths.num_suspects)
        _, last = await ask_twice(stage, body, "/v1/responses")

        assert last.status == 422
        assert sum(len(engine.received) for engine in engines) == 2


async def test_a_prompt_that_hangs_replicas_counts_too() -> None:
    """Its probes fail, and its client gives up on the second one."""
    engines = [mortal("hangs") for _ in range(3)]
    async with engines[0], engines[1], engines[2], on_stage(*engines, **QUICK) as stage:
        async with stage.hanging_up(chat(POISON)):
            await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 1)
        await stage.until(lambda: stage.router.deaths.num_suspects == 2)
        reply = await stage.ask(chat(POISON))

        assert reply.status == 422
        assert sum(engine.hangs for engine in engines) == 2


async def test_uploads_are_recognised_though_their_boundary_is_another() -> None:
    """OpenAI's SDK draws a new one for each try."""
    engines = [mortal("breaks off") for _ in range(3)]
    async with (
        engines[0],
        engines[1],
        engines[2],
        on_stage(*engines, forward__max_tries=1) as stage,
        sdk(stage) as client,
    ):
        with pytest.raises(openai.UnprocessableEntityError):
            await client.audio.transcriptions.create(
                model="tiny", file=("a.wav", SECRET.encode() * 1000)
            )
        assert sum(len(engine.received) for engine in engines) == 2


async def test_a_tenant_suffers_from_no_others_requests(tmp_path: Path) -> None:
    """Its own request of the same body is another."""
    file = tenants_file(tmp_path)
    async with Engines(5) as engines, on_stage(*engines, tenants__file=file) as stage:
        poison(engines)
        _, refused = await ask_twice(stage, chat(POISON), headers=A)
        for engine in engines:
            engine.app.clear_faults()
        again = await stage.ask(chat(POISON), headers=A)
        other = await stage.ask(chat(POISON), headers=B)

        assert [refused.status, again.status, other.status] == [422, 422, 200]
        assert "r1" not in again.error["message"]


async def test_the_end_of_a_draining_replica_is_no_death() -> None:
    """An operator takes replicas down one after another, with a long answer in flight."""
    async with (
        Engines(4, time_model=SLOW, reply_tokens=200) as engines,
        on_stage(*engines, policy__name="round_robin", **QUICK) as stage,
    ):
        async with asyncio.TaskGroup() as tg:
            asked = tg.create_task(stage.ask(chat(POISON, max_tokens=200)))
            for _ in range(2):
                await stage.until(lambda: any(map(num_running, engines)))
                busy = next(engine for engine in engines if num_running(engine))
                (name,) = [r.name for r in stage.router.fleet.members.replicas if r.url == busy.url]
                await stage.admin(f"/admin/replicas/{name}/drain", {"draining": True})
                arm(busy, "kill")
                await busy.serve()

        assert asked.result().status == 502
        assert not stage.router.deaths.num_suspects
