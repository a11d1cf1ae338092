"""Cache diagnostics in the APIs' own fields, through a whole router in front of engines."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, Json, Reply, Stage, holder, on_stage, words
from tests.faults.tenants import A, B, C, tenants_file

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOLS = [
    {"name": name, "description": words(50 + at), "input_schema": {"type": "object"}}
    for at, name in enumerate(("ls", "cat"))
]


@asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[tuple[Stage, Emulator]]:
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        yield stage, engines[0]


def message(*texts: str, **fields: Any) -> Json:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    system = [{"type": "text", "text": words(99)}]
    body = {"model": "tiny", "max_tokens": 4, "system": system, "messages": messages}
    return body | {"tools": TOOLS} | fields


def response(*texts: str, **fields: Any) -> Json:
    roles = ("user", "assistant")
    items = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"model": "tiny", "max_output_tokens": 4, "instructions": words(99), "input": items}
    return body | fields


def after(earlier: str | None) -> Json:
    """Ask for diagnostics, in both APIs."""
    return {
        "diagnostics": {"previous_message_id": earlier},
        "prompt_cache_options": {"comparison_response_id": earlier},
    }


def is_stream(reply: Reply) -> bool:
    return reply.headers["Content-Type"].startswith("text/event-stream")


def answer_in(reply: Reply) -> Json:
    """Read the message or the response, of a stream that of the event that has diagnostics."""
    assert reply.status == 200, reply.body
    if not is_stream(reply):
        found: Json = reply.json()
        return found
    kinds = {"message_start": "message", "response.completed": "response"}
    [found] = [event[kinds[event["type"]]] for event in reply.events if event["type"] in kinds]
    return found


def id_of(reply: Reply) -> str:
    return str(answer_in(reply)["id"])


def reason(reply: Reply) -> str | None:
    """Read why a message's cache was missed."""
    found = answer_in(reply)["diagnostics"]
    return found and str(found["cache_miss_reason"]["type"])


def finding(reply: Reply) -> Json:
    found: Json = answer_in(reply)["prompt_cache_diagnostics"]
    return found


SHAPES = [{}, {"stream": True}]
FIRST = (words(1), "yes", words(2))
CHANGES: list[tuple[Json, Json, str | None, str | None]] = [
    ({}, message(*FIRST, "no", words(3)), None, None),
    ({}, message(*FIRST), None, None),
    ({}, message(words(1), "yes", words(9)), "messages_changed", "input_changed"),
    ({}, message(*FIRST, system=words(98)), "system_changed", "input_changed"),
    ({}, message(*FIRST, tools=TOOLS[::-1]), "tools_changed", "tools_changed"),
    ({}, message(*FIRST, tools=TOOLS[:1]), "tools_changed", "tools_changed"),
    ({}, message(words(7)), "messages_changed", "context_compacted"),
    ({}, message(*FIRST, cache_salt="other"), "unavailable", None),
]


def as_response(body: Json) -> Json:
    """Say the same in the Responses API."""
    fields = {k: v for k, v in body.items() if k not in ("messages", "system", "max_tokens")}
    tools = [
        {"type": "function", "name": tool["name"], "description": tool["description"],
         "parameters": tool["input_schema"]}
        for tool in body["tools"]
    ]  # fmt: skip
    system = body["system"]
    instructions = system if isinstance(system, str) else system[0]["text"]
    said = {"instructions": instructions, "input": body["messages"], "max_output_tokens": 4}
    return fields | said | {"tools": tools}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("first", "second", "why", "_"), CHANGES)
async def test_a_message_says_what_changed(
    shape: Json, first: Json, second: Json, why: str | None, _: str | None
) -> None:
    async with scene() as (stage, engine):
        one = await stage.ask(message(*FIRST, **first, **shape, **after(None)), MESSAGES)
        await stage.settled(engine)
        two = await stage.ask(second | shape | after(id_of(one)), MESSAGES)

    assert reason(one) is None
    assert reason(two) == why
    if why is not None and why != "unavailable":
        missed = answer_in(two)["diagnostics"]["cache_miss_reason"]["cache_missed_input_tokens"]
        assert missed > 50


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("first", "second", "why", "named"), CHANGES)
async def test_a_response_says_what_changed(
    shape: Json, first: Json, second: Json, why: str | None, named: str | None
) -> None:
    """The first turn needs no option."""
    async with scene() as (stage, engine):
        one = await stage.ask(as_response(message(*FIRST, **first)) | shape, RESPONSES)
        await stage.settled(engine)
        two = await stage.ask(as_response(second) | shape | after(id_of(one)), RESPONSES)

    assert "prompt_cache_diagnostics" not in answer_in(one)
    found = finding(two)
    if why is None:
        assert found == {"type": "cache_hit"}
    elif named is None:
        assert found == {"type": "unavailable"}
    else:
        assert (found["type"], found["reason"]) == ("cache_miss", named)
        assert found["cache_missed_tokens"] > 50
        assert found["comparison_reusable_tokens"] % 16 == 0


async def test_what_a_cache_lost_has_no_name_in_the_apis() -> None:
    """Nothing changed; that the engine was restarted says the router's own header."""
    async with scene() as (stage, engine):
        one = await stage.ask(message(*FIRST, **after(None)), MESSAGES)
        there = {"X-Session-ID": f"other-{SECRET}"}
        other = await stage.ask(response(*FIRST), RESPONSES, headers=there)
        await stage.settled(engine)
        holder(stage, one, [engine]).replica.reset_prefix_cache(preempt=False)
        await stage.ask(message(words(20)), MESSAGES, headers={"X-Session-ID": f"last-{SECRET}"})
        await stage.settled(engine)
        two = await stage.ask(message(*FIRST, "no", words(3), **after(id_of(one))), MESSAGES)
        again = response(*FIRST, **after(id_of(other)))
        lost = await stage.ask(again, RESPONSES, headers=there)

    assert reason(two) is None
    assert "cleared=" in two.headers["x-warmroute-computed"]
    assert finding(lost) == {"type": "unavailable"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_id_that_nobody_knows_is_not_found(shape: Json) -> None:
    async with scene() as (stage, _):
        for name in ("msg_0", "", "x" * 5000):
            one = await stage.ask(message("hi") | shape | after(name), MESSAGES)
            two = await stage.ask(response("hi") | shape | after(name), RESPONSES)

            assert reason(one) == "previous_message_not_found"
            assert finding(two) == {"type": "comparison_response_not_found"}


@pytest.mark.parametrize("field", [None, 1, "id", [], {"previous_message_id": 1}, {"a": "b"}])
async def test_garbage_is_ignored(field: Any) -> None:
    """As engines ignore it."""
    async with scene() as (stage, _):
        one = await stage.ask(message("hi", diagnostics=field), MESSAGES)
        two = await stage.ask(response("hi", prompt_cache_options=field), RESPONSES)

    assert answer_in(one).get("diagnostics") is None
    assert "prompt_cache_diagnostics" not in answer_in(two)


async def test_tenants_do_not_know_each_others_answers(tmp_path: Path) -> None:
    """An id of another tenant is one that nobody knows, also where both share a cache."""
    async with scene(tenants__file=tenants_file(tmp_path)) as (stage, engine):
        one = await stage.ask(message(*FIRST, **after(None)), MESSAGES, headers=A)
        await stage.settled(engine)
        for headers, why in (
            (A, None),
            (B, "previous_message_not_found"),
            (C, "previous_message_not_found"),
        ):
            two = await stage.ask(message(*FIRST, **after(id_of(one))), MESSAGES, headers=headers)
            assert reason(two) == why


async def test_an_answer_before_the_last_may_be_named() -> None:
    """After an answer that its client threw away, or for a second branch of a conversation."""
    async with scene() as (stage, engine):
        one = await stage.ask(message(words(1), **after(None)), MESSAGES)
        await stage.settled(engine)
        history = (words(1), "yes", words(2))
        two = await stage.ask(message(*history, **after(id_of(one))), MESSAGES)
        await stage.settled(engine)
        other = await stage.ask(message(words(1), "no", words(3), **after(id_of(one))), MESSAGES)
        await stage.settled(engine)
        lost = await stage.ask(message(*history, "no", **after(id_of(two))), MESSAGES)
        edited = await stage.ask(message(words(9), **after(id_of(one))), MESSAGES)

    assert [reason(each) for each in (one, two, other)] == [None, None, None]
    assert reason(lost) == "previous_message_not_found"
    assert reason(edited) == "messages_changed"


async def test_clients_that_do_not_ask_may_be_told() -> None:
    """If the operator wants that: Messages are compared with the last ones of their session."""
    async with scene(forward__diagnostics="always") as (stage, engine):
        one = await stage.ask(message(*FIRST), MESSAGES)
        await stage.settled(engine)
        two = await stage.ask(message(*FIRST, system=words(98), stream=True), MESSAGES)
        asked = await stage.ask(message(*FIRST, **after("msg_0")), MESSAGES)
        other = await stage.ask(response(*FIRST), RESPONSES)

    assert [reason(each) for each in (one, two, asked)] == [
        None,
        "system_changed",
        "previous_message_not_found",
    ]
    assert "prompt_cache_diagnostics" not in answer_in(other)


async def test_another_conversation_may_be_named() -> None:
    """A session that was resumed under another name."""
    async with scene() as (stage, engine):
        one = await stage.ask(message(*FIRST, **after(None)), MESSAGES)
        await stage.settled(engine)
        two = await stage.ask(
            message(words(1), "yes", words(9), **after(id_of(one))),
            MESSAGES,
            headers={"X-Session-ID": f"resumed-{SECRET}"},
        )

    assert reason(two) == "messages_changed"


def _start(body: Json) -> bytes:
    return b"event: message_start\ndata: " + orjson.dumps(body) + b"\n\n"


STREAM = (
    _start({"type": "message_start", "message": {"id": "m1", "role": "assistant"}})
    + b'event: ping\ndata: {"type":"ping"}\n\n'
    + b'event: content_block_delta\ndata: {"type":"x", "text":"a\\u0062"}\n\n'
    + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


async def test_all_other_bytes_stay() -> None:
    """A stream in pieces of any size; and of who does not ask every byte."""
    sizes = [len(STREAM)]

    async def cut(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        size = sizes[-1]
        for at in range(0, len(STREAM), size):
            await reply.write(STREAM[at : at + size])
        await reply.write_eof()
        return reply

    wanted = STREAM.replace(b'"assistant"}', b'"assistant","diagnostics":null}', 1)
    async with FakeEngine(cut) as engine, on_stage(engine) as stage:
        for size in (len(STREAM), 1, 7, 30, 100):
            sizes.append(size)
            plain = await stage.ask(message("hi", stream=True), MESSAGES)
            asked = await stage.ask(message("hi", stream=True, **after(None)), MESSAGES)

            assert plain.body == STREAM
            assert "x-warmroute-computed" not in plain.headers
            assert asked.body == wanted


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (400, {}, b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'),
        (200, {"Content-Encoding": "gzip"}, b'{"id":"m1"}'),
        (200, {}, b'["no object"]'),
        (200, {}, b"no JSON"),
        (200, {}, b'{"id":"m1","text":"' + b"x" * (2 << 20) + b'"}'),
    ],
)
async def test_errors_and_what_cannot_be_read_stay(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        sent = gzip.compress(body) if headers else body
        headers_sent = {"Content-Type": "application/json", **headers}
        return web.Response(status=status, headers=headers_sent, body=sent)

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(message("hi", **after(None)), MESSAGES)

    assert (reply.status, reply.body) == (status, body)


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    """What was kept of the event that did not come whole goes out before it."""

    async def broken(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b'event: response.output_text.delta\ndata: {"type":"x"}\n\n')
        await reply.write(b'event: response.completed\ndata: {"response":')
        assert request.transport is not None
        request.transport.abort()
        return reply

    async with FakeEngine(broken) as engine, on_stage(engine) as stage:
        reply = await stage.ask(response("hi", stream=True, **after("r0")), RESPONSES)

    assert b'event: response.completed\ndata: {"response":\n\nevent: error\n' in reply.body


async def test_the_openai_client_reads_it() -> None:
    async with (
        scene() as (stage, engine),
        openai.AsyncOpenAI(base_url=stage.url + "/v1", api_key=SECRET, max_retries=0) as api,
    ):
        asked: Any = {"model": "tiny", "instructions": words(99), "max_output_tokens": 4}
        first = await api.responses.create(**asked, input=words(1))
        await stage.settled(engine)
        asked["prompt_cache_options"] = {"comparison_response_id": first.id}
        same = await api.responses.create(**asked, input=words(1))
        stream = await api.responses.create(**asked, input=words(2), stream=True)
        last = [event async for event in stream][-1]

    assert same.prompt_cache_diagnostics is not None
    assert same.prompt_cache_diagnostics.type == "cache_hit"
    assert last.type == "response.completed"
    found = last.response.prompt_cache_diagnostics
    assert found is not None
    assert found.type == "cache_miss"
    assert found.reason == "input_changed"
