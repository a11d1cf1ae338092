"""A stream whose engine dies in it: its client has the answer. Page: docs/operate/failures.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.time_model import TimeModel
from tests.faults.fake_engine import FakeEngine, hang_up
from tests.faults.stage import (
    SLOW,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    holder,
    num_running,
    on_stage,
    records_in,
    streamed,
    words,
)

PATHS = {"/v1/chat/completions": chat, "/v1/completions": lambda text: completion(text)}
LONG = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
IDS = {"return_token_ids": True}


def completion(text: str) -> Json:
    return {"model": "tiny", "prompt": text}


def continued(stage: Stage, result: str = "continued", **labels: str) -> float:
    return stage.metric("warmroute_continuations_total", result=result, **labels)


def text_of(reply: Reply) -> str:
    """Put a stream's text together."""
    assert "[DONE]" in reply.events, reply.events[-1]
    choices = [event["choices"] for event in reply.events[:-1]]
    parts = [(c[0].get("delta") or {}).get("content") or c[0].get("text") for c in choices if c]
    return "".join(part or "" for part in parts)


def ids_of(reply: Reply) -> list[int]:
    choices = [event["choices"] for event in reply.events[:-1]]
    return [i for choice in choices if choice for i in choice[0].get("token_ids") or ()]


HARMONY: Json = {
    "tokens__tokenizer_modes": {"tiny": "harmony"},
    "tokens__start_dates": {"tiny": "2025-06-28"},
}
"""As for gpt-oss: what it generates is messages, of which its answers have a part."""


@asynccontextmanager
async def greedy(number: int = 2, **settings: Any) -> AsyncIterator[tuple[Stage, list[Emulator]]]:
    """Run engines that say the same to the same, and one of which has proven our tokens."""
    async with (
        Engines(number, reply="greedy", time_model=SLOW, tick_ms=1) as engines,
        on_stage(*engines, **settings) as stage,
    ):
        await stage.ask(chat("proof"))
        yield stage, list(engines)


async def disturbed(
    stage: Stage, engines: list[Emulator], body: Json, path: str, fault: str, whole: Reply
) -> Reply:
    """Ask again, and let the engine that answers, it has the prompt, die when it said a little."""
    await stage.settled(*engines)
    if fault == "die_after":
        arm(holder(stage, whole, engines), fault, after_tokens=3, count=1)
    async with stage.asking(body, path) as answer:
        said = await answer.content.readany()
        while said.count(b"data:") < 3:
            said += await answer.content.readany()
        if fault != "die_after":
            arm(next(engine for engine in engines if num_running(engine)), fault)
        return Reply(answer.status, answer.headers, said + await answer.read())


@pytest.mark.parametrize("fault", ["die_after", "kill"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_whose_engine_dies_goes_on_elsewhere(path: str, fault: str) -> None:
    """Its text is an undisturbed one's, its usage adds up, it has one id, one role, one end."""
    async with greedy() as (stage, engines):
        body = streamed(PATHS[path](words(1)) | LONG)
        whole = await stage.ask(body, path)
        reply = await disturbed(stage, engines, body, path, fault, whole)

        assert text_of(reply) == text_of(whole)
        assert len({event["id"] for event in reply.events[:-1]}) == 1
        assert reply.body.count(b'"role"') == whole.body.count(b'"role"')
        assert reply.body.count(b"[DONE]") == 1
        expected = {key: value for key, value in whole.usage.items() if isinstance(value, int)}
        assert reply.usage == expected
        assert continued(stage) == 1
        assert stage.metric("warmroute_requests_total", outcome="ok") == 3
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 0
        assert "continued a failed stream" in stage.log


@pytest.mark.parametrize("path", PATHS)
async def test_ids_that_were_asked_for_add_up(path: str) -> None:
    """Those of both engines are those of an undisturbed answer."""
    async with greedy() as (stage, engines):
        body = streamed(PATHS[path](words(1)) | LONG | IDS)
        whole = await stage.ask(body, path)
        reply = await disturbed(stage, engines, body, path, "kill", whole)

        assert ids_of(reply) == ids_of(whole)
        assert len(ids_of(reply)) == LONG["max_tokens"]
        assert text_of(reply) == text_of(whole)
        assert continued(stage) == 1


async def test_what_two_engines_died_of_ends(tmp_path: Path) -> None:
    """It may be the request's own fault: a third is not risked, and none of the two is blamed."""
    records = tmp_path / "decisions.jsonl"
    async with greedy(3, log__decisions=records) as (stage, engines):
        for engine in engines:
            arm(engine, "die_after", after_tokens=3)
        reply = await stage.ask(streamed(chat(words(1)) | LONG))

        assert "error" in reply.events[-1]
        assert continued(stage) == 1
        assert continued(stage, "refused", reason="sent_twice") == 1
        assert stage.metric("warmroute_failures_absolved_total", why="same_elsewhere") == 1
    record = records_in(records)[-1]
    assert [t.failure for t in record.tries] == ["upstream_broken", "upstream_broken"]
    assert record.outcome == "replica_failed"
    assert record.num_continued_tokens >= 3
    assert record.ttft_ms is None


async def test_a_client_that_leaves_while_it_goes_on_leaves_nothing() -> None:
    """The stage looks for leases, claims and open answers."""
    async with greedy() as (stage, engines):
        body = streamed(chat(words(1)) | LONG | {"max_tokens": 500})
        whole = await stage.ask(body | {"max_tokens": 4})
        await stage.settled(*engines)
        arm(holder(stage, whole, engines), "die_after", after_tokens=3, count=1)
        async with stage.asking(body) as answer:
            while not continued(stage):
                await answer.content.readany()
        await stage.until(lambda: not any(num_running(engine) for engine in engines))

        assert stage.metric("warmroute_requests_total", outcome="client_gone") == 1


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {}, "tools"),
        ({"seed": 1, "temperature": 1.0}, {}, "sampling"),
        ({}, {"forward__continue_streams": False}, "off"),
        ({}, {"forward__max_tries": 1}, "max_tries"),
        ({}, HARMONY, "text"),
    ],
    ids=["tools", "sampling", "off", "tries", "gpt-oss"],
)
async def test_what_cannot_go_on_ends_with_an_error_event(
    fields: Json, settings: Json, reason: str
) -> None:
    """And the reason is counted."""
    async with greedy(**settings) as (stage, engines):
        body = streamed(chat(words(1)) | LONG | {"max_tokens": 500} | fields)
        whole = await stage.ask(body | {"max_tokens": 4})
        reply = await disturbed(stage, engines, body, "/v1/chat/completions", "kill", whole)

        assert "[DONE]" not in reply.events
        assert reply.events[-1]["error"]["code"] == 502
        assert continued(stage, "refused", reason=reason) == 1
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 1


# -- engines that break off at a certain place ---------------------------------------------------

Dies = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
ERROR = b'data: {"error": {"message": "EngineCore died", "type": "x", "param": null, "code": 500}}'


async def cut_off(request: web.Request, _: web.StreamResponse) -> None:
    await asyncio.sleep(0.02)  # what was written leaves first
    hang_up(request)


async def end_early(_: web.Request, response: web.StreamResponse) -> None:
    await response.write_eof()


async def fall_silent(_: web.Request, __: web.StreamResponse) -> None:
    await asyncio.Event().wait()


async def say_so(_: web.Request, response: web.StreamResponse) -> None:
    await response.write(ERROR + b"\n\ndata: [DONE]\n\n")


@asynccontextmanager
async def half_dead(
    path: str, body: Json, num_bytes: Callable[[bytes], int], dies: Dies
) -> AsyncIterator[tuple[Stage, bytes]]:
    """Put an engine that dies inside its answers beside one that does not.

    Hands out the stage and the undisturbed answer.
    """
    stream = b""
    # Long enough for a busy machine: the replica that goes on must not be silent for so long.
    idle_s = 5 if dies is fall_silent else 60

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(stream[: num_bytes(stream)])
        await dies(request, response)
        return response

    async with (
        Engines(1, reply="greedy", time_model=TimeModel(base_ms=3.0)) as (engine,),
        FakeEngine(answer) as fake,
        on_stage(engine, fake, policy__name="round_robin", forward__idle_timeout_s=idle_s) as stage,
    ):
        async with aiohttp.ClientSession() as client:
            async with client.post(engine.url + path, json=body) as whole:
                stream = await whole.read()
        while True:  # until the real one has proven our tokens and the other one's turn has come
            reply = await stage.ask(chat("proof"))
            if reply.replica == "r1":
                break
        yield stage, stream


CHAT, COMPLETION = PATHS


def in_event(stream: bytes) -> int:
    return stream.index(b" ", 700)


def between(stream: bytes) -> int:
    return stream.index(b"\n\n", 700) + 2


@pytest.mark.parametrize(
    ("path", "place", "dies"),
    [
        (CHAT, in_event, cut_off),
        (COMPLETION, in_event, cut_off),
        (CHAT, between, cut_off),
        (COMPLETION, between, end_early),
        (CHAT, between, say_so),
        (COMPLETION, in_event, fall_silent),
    ],
    ids=["chat", "completion", "between", "early-end", "error-event", "silence"],
)
async def test_in_the_middle_of_an_answer(
    path: str, place: Callable[[bytes], int], dies: Dies
) -> None:
    """However the engine ended, and however much of an event came of it."""
    body = streamed(PATHS[path](words(1)) | LONG)
    async with half_dead(path, body, place, dies) as (stage, stream):
        reply = await stage.ask(body, path)

        assert reply.replica == "r2"
        assert text_of(reply) == text_of(Reply(200, reply.headers, stream))
        reason = "upstream_timeout" if dies is fall_silent else "upstream_broken"
        assert continued(stage, reason=reason) == 1


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (CHAT, lambda stream: stream.index(b"\n\n", stream.index(b'finish_reason":"length')) + 2),
        (COMPLETION, lambda stream: stream.index(b"data: [DONE]")),
        (CHAT, lambda stream: len(stream) - 3),
    ],
    ids=["after-finish", "after-usage", "in-done"],
)
async def test_at_the_end_of_an_answer(path: str, place: Callable[[bytes], int]) -> None:
    """No other replica is needed: what is missing is known."""
    body = streamed(PATHS[path](words(1)) | LONG)
    async with half_dead(path, body, place, cut_off) as (stage, stream):
        whole = Reply(200, {}, stream)  # type: ignore[arg-type]
        reply = await stage.ask(body, path)

        assert reply.replica == "r2"
        assert text_of(reply) == text_of(whole)
        usage = orjson.loads(reply.body.split(b"data: ")[-2])["usage"]
        assert usage["completion_tokens"] == LONG["max_tokens"]
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert continued(stage, "concluded") == 1
        assert continued(stage) == 0


async def test_an_engines_own_error_is_what_its_client_sees() -> None:
    """Where no other can go on: its own words, as without a router."""
    body = streamed(chat(words(1), tool_choice="auto") | LONG | {"logit_processors": []})

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        await say_so(request, response)
        return response

    async with FakeEngine(answer) as fake, on_stage(fake) as stage:
        for fields in ({}, {"logprobs": True}):
            reply = await stage.ask(body | fields)

            assert ERROR in reply.body
