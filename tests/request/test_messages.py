"""`/v1/messages` through a router: known, placed, audited and recorded as chats are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from router.api.apis import APIS
from tests.faults.fake_engine import FakeEngine
from tests.faults.models import model_dir
from tests.faults.stage import Engines, Json, Reply, on_stage, records_in, words

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {
    "name": "read_file",
    "description": "Read a file.",
    "input_schema": {"properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def message(*texts: str, **fields: Any) -> Json:
    """Write a body: user and assistant in turns, and a system prompt."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    system = [{"type": "text", "text": words(99)}]
    return {"model": "tiny", "max_tokens": 4, "system": system, "messages": messages} | fields


def usage_of(reply: Reply) -> Json:
    """Read the usage of an answer, or of the one event of a stream that has all of it."""
    if not reply.headers["Content-Type"].startswith("text/event-stream"):
        found: Json = reply.json()["usage"]
        return found
    [delta] = [event for event in reply.events if event["type"] == "message_delta"]
    usage: Json = delta["usage"]
    return usage


def prompt_tokens(reply: Reply) -> int:
    usage = usage_of(reply)
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[part] for part in parts)


def text_of(reply: Reply) -> str:
    return str(reply.json()["content"][0]["text"])


async def test_turns_are_predicted(tmp_path: Path) -> None:
    """Whole and streamed: the same replica, the cached tokens and the prompt's are the engine's."""
    file = tmp_path / "decisions.jsonl"
    async with Engines(2) as engines, on_stage(*engines, log__decisions=file) as stage:
        replies = [await stage.ask(message(words(1)), PATH)]
        said = [words(1), text_of(replies[0]), words(2)]
        for fields in ({}, {"stream": True}, {"stream": True, "tools": [TOOL]}):
            await stage.settled(*engines)
            replies.append(await stage.ask(message(*said, **fields), PATH))

        for reply in replies:
            assert reply.status == 200, reply.body
            assert reply.replica == replies[0].replica
            assert reply.predicted == usage_of(reply)["cache_read_input_tokens"]
        assert replies[1].predicted > 0
        assert replies[2].predicted > replies[1].predicted
        assert stage.metric("warmroute_tokenized_requests_total", way="local") == 4
        assert stage.metric("warmroute_requests_total", api="messages", outcome="ok") == 4
        assert stage.metric("warmroute_audited_total", result="exact") == 4

    records = records_in(file)
    for record, reply in zip(records, replies, strict=True):
        assert record.api == "messages"
        assert record.num_prompt_tokens == prompt_tokens(reply)
        assert record.num_completion_tokens == usage_of(reply)["output_tokens"]
        assert record.num_reported_cached_tokens == record.num_predicted_cached_tokens
    assert [record.ttft_ms is not None for record in records] == [False, False, True, True]


@pytest.mark.parametrize("hold_s", [1.0, 0.0])
async def test_the_first_token_is_what_was_generated(
    hold_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is the first generated text; until then the request counts as queued."""
    monkeypatch.setitem(APIS, PATH, replace(APIS[PATH], hold_s=hold_s))
    generate, end = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: message_start\ndata: {"type":"message_start"}\n\n')
        await generate.wait()
        await response.write(b'event: content_block_delta\ndata: {"type":"x"}\n\n')
        await end.wait()
        return response

    async with FakeEngine(slow) as engine, on_stage(engine) as stage:

        def num_waiting() -> int:
            return sum(s.num_queued_tokens > 0 for s in stage.router.fleet.load.status(0.0))

        async with asyncio.TaskGroup() as tg:
            asked = tg.create_task(stage.ask(message(words(1), stream=True), PATH))
            await engine.reached.wait()
            await stage.until(num_waiting)
            assert num_waiting() == 1
            generate.set()
            await stage.until(lambda: num_waiting() == 0)
            assert not asked.done()
            end.set()


async def test_what_we_refuse_has_the_apis_shape() -> None:
    """It has the shape of the engine's own refusals."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        refused = await stage.ask(message("a") | {"model": 5}, PATH)
        unknown = await stage.ask(message("a") | {"model": "none"}, PATH)

        assert (refused.status, refused.json()["type"]) == (400, "error")
        assert refused.error["type"] == "invalid_request_error"
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")


async def test_what_is_not_known_is_forwarded_and_counted() -> None:
    """An unknown block is the engine's to refuse: in its own words, without tokens."""
    block = {"type": "document", "source": {"type": "text", "data": "x"}}
    body = message("a") | {"messages": [{"role": "user", "content": [block]}]}
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(body, PATH)

        assert (reply.status, reply.json()["type"]) == (400, "error")
        assert stage.metric("warmroute_needs_engine_total", api="messages", why="block") == 1
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 1
        assert stage.metric("warmroute_refused_total") == 0


async def test_tokens_are_counted_here_once_that_is_proven() -> None:
    """The engine counts before that, and what is unknown here; the numbers are the same."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        asked = message(words(1), words(2), words(3))
        of_engine = await stage.ask(asked, COUNT)
        answered = await stage.ask(asked, PATH)
        of_router = await stage.ask(asked, COUNT)
        with_tools = await stage.ask(asked | {"tools": [TOOL]}, COUNT)

        assert of_router.json() == of_engine.json()
        assert of_router.json()["input_tokens"] == prompt_tokens(answered)
        assert with_tools.json()["input_tokens"] > of_router.json()["input_tokens"]
        assert of_router.headers["x-warmroute-request-id"]
        assert stage.metric("warmroute_counted_requests_total", by="router") == 1
        assert stage.metric("warmroute_counted_requests_total", by="engine") == 2


async def test_an_engine_tokenizes_what_cannot_be_here(tmp_path: Path) -> None:
    """It gets the converted chat; where that needs an unknown template, there are no tokens."""
    folder = model_dir(tmp_path / "m", without="tokenizer.json")
    reminder = {"role": "system", "content": "remember"}
    async with Engines(1) as engines, on_stage(*engines, tokens__models={"tiny": folder}) as stage:
        first = await stage.ask(message(words(1)), PATH)
        await stage.settled(*engines)
        second = await stage.ask(message(words(1), text_of(first), words(2)), PATH)
        body = message(words(1), text_of(first), words(2))
        body["messages"].insert(1, reminder)
        third = await stage.ask(body, PATH)

        assert second.predicted == usage_of(second)["cache_read_input_tokens"] > 0
        assert third.status == 200
        assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 2
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 1


async def test_a_message_can_be_explained() -> None:
    """With its tokens and every candidate's costs."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        answered = await stage.ask(message(words(1)), PATH)
        explained = (await stage.admin("/admin/explain?api=messages", message(words(1)))).json()
        refused = await stage.admin("/admin/explain?api=mail", message(words(1)))

        assert explained["num_tokens"] == prompt_tokens(answered)
        assert explained["way"] == "local"
        assert (refused.status, refused.error["param"]) == (400, "api")
