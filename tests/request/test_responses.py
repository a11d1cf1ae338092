"""The Responses API through a whole router: known as chats are, in front of emulated engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.faults.fake_engine import FakeEngine, streams
from tests.faults.stage import (
    SECRET,
    SLOW,
    STUCK,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    num_running,
    on_stage,
    words,
)

PATH = "/v1/responses"
TOOL: Json = {"type": "function", "name": "ls", "parameters": {"type": "object"}}


def agent_items(num_steps: int) -> list[Json]:
    """Write an agent's items: the question, its thinking, calls and their results."""
    items: list[Json] = [
        {"type": "message", "role": "developer", "content": words(1)},
        {"role": "user", "content": [{"type": "input_text", "text": words(2, num_words=200)}]},
    ]
    for step in range(num_steps):
        items += [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": words(100 + step)}],
            },
            {
                "type": "function_call",
                "name": "ls",
                "call_id": f"c{step}",
                "arguments": '{"path": "ä/ö"}',
            },
            {"type": "function_call_output", "call_id": f"c{step}", "output": words(200 + step)},
        ]
    return items


def asked(num_steps: int = 1, **fields: Any) -> Json:
    body = {"model": "tiny", "input": agent_items(num_steps), "tools": [TOOL]}
    return body | {"max_output_tokens": 4} | fields


def event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage_of(reply: Reply) -> Json:
    if reply.headers["Content-Type"].startswith("text/event-stream"):
        usage: Json = reply.events[-1]["response"]["usage"]
        return usage
    whole: Json = reply.json()["usage"]
    return whole


def kinds(reply: Reply) -> list[str]:
    return [event["type"] for event in reply.events]


async def ask(stage: Stage, body: Json, **headers: str) -> Reply:
    reply = await stage.ask(body, PATH, headers=headers)
    assert reply.status == 200
    return reply


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_is_predicted_to_the_token(stream: bool, tmp_path: Path) -> None:
    """Each turn goes to the replica that holds the prompt; the prediction is what it reports."""
    records = tmp_path / "decisions.jsonl"
    async with Engines(2) as engines, on_stage(*engines, log__decisions=records) as stage:
        for num_steps in range(1, 6):
            reply = await ask(stage, asked(num_steps, stream=stream))
            await stage.knows(*engines)
            usage = usage_of(reply)
            assert reply.predicted == usage["input_tokens_details"]["cached_tokens"]
            assert (reply.predicted > 0) == (num_steps > 1)
        assert stage.metric("warmroute_audited_total", result="exact") == 5
        assert stage.metric("warmroute_tokenized_requests_total", way="local") == 5
        assert stage.metric("warmroute_token_mismatches_total") == 0
        assert stage.metric("warmroute_requests_total", api="responses", outcome="ok") == 5
    written = [orjson.loads(line) for line in records.read_bytes().splitlines()]
    assert [record["api"] for record in written] == ["responses"] * 5
    assert all((record["ttft_ms"] is not None) == stream for record in written)
    assert written[-1]["num_prompt_tokens"] == usage["input_tokens"]
    assert written[-1]["num_completion_tokens"] == 4


async def test_its_work_counts_as_load() -> None:
    """Meanwhile other requests go elsewhere; nothing is learned of its time before a token."""
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines) as stage:
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(stage.ask(asked(stream=True), PATH))
            await stage.until(lambda: stage.metric("warmroute_inflight_uncached_tokens") > 300)
            await stage.until(lambda: any(map(num_running, engines)))
            fleet = stage.router.fleet
            (busy,) = (r.name for r in fleet.members.replicas if not fleet.load.is_idle(r.name))
            other = {"model": "tiny", "input": words(9, num_words=200)}
            explained = (await stage.admin("/admin/explain", other)).json()
            task.cancel()

        assert explained["decision"]["candidate"] != busy
        assert stage.metric("warmroute_ttft_seconds_count") == 0


@pytest.mark.parametrize("num_tools", [1, 4000])
async def test_a_stream_that_breaks_before_a_token_is_answered_elsewhere(num_tools: int) -> None:
    """Also after long first events, which repeat the tools; the client sees one beginning."""
    # What is dropped before it is rendered still comes back in the first events.
    tools = [
        {"type": "web_search", "filters": {"allowed_domains": [f"{n}.example"]}}
        for n in range(num_tools)
    ]
    async with Engines(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        arm(engines[0], "first_event_error", count=1)
        body = {"model": "tiny", "input": f"{SECRET} hi", "tools": tools, "stream": True}
        replies = [await stage.ask(body, PATH) for _ in range(2)]

        for reply in replies:
            assert kinds(reply).count("response.created") == 1
            assert kinds(reply)[-1] == "response.completed"
        assert stage.metric("warmroute_failovers_total") == 1


CHAT = "/v1/chat/completions"
COMPLETED: Json = {
    "type": "response.completed",
    "response": {"usage": {"input_tokens": 9, "output_tokens": 1}},
}
CHAT_USAGE = {"prompt_tokens": 9, "completion_tokens": 1}
CHUNK: Json = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": CHAT_USAGE}
STOPPED: Json = {
    "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}],
    "usage": CHAT_USAGE,
}
SAID: Json = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "sent", "outcome"),
    [
        (PATH, asked(stream=True), event(COMPLETED), "ok"),
        (CHAT, SAID, event(STOPPED) + b"data: [DONE]\n\n", "ok"),
        (CHAT, SAID, event(CHUNK), "client_gone"),
    ],
    ids=["response", "chat", "half a chat"],
)
async def test_a_client_that_leaves_with_the_last_event_has_the_answer(
    path: str, body: Json, sent: bytes, outcome: str
) -> None:
    """Codex closes on the last event, while the engine's stream is open; any earlier, it left."""
    async with FakeEngine(streams(sent, then="hold")) as engine, on_stage(engine) as stage:
        async with stage.asking(body, path) as reply:
            got = b""
            while len(got) < len(sent):
                got += await reply.content.readany()
        await stage.until(lambda: stage.metric("warmroute_requests_total"))

        assert stage.metric("warmroute_requests_total", outcome=outcome) == 1


async def test_a_stream_that_breaks_later_ends_with_an_error_event() -> None:
    """In a shape that this API's clients and OpenAI's both know."""
    async with Engines(1, time_model=SLOW) as engines, on_stage(*engines) as stage:
        arm(engines[0], "die_after", after_tokens=2, count=1)
        reply = await stage.ask(asked(stream=True, max_output_tokens=20), PATH)

        last = reply.events[-1]
        assert (last["type"], last["code"]) == ("error", "upstream_broken")
        assert last["error"]["message"] == last["message"]
        assert b"event: error\n" in reply.body


async def test_a_rank_of_the_engines_choice_proves_nothing() -> None:
    """Where the engine ignores the rank header, its report does not count against the index.

    What is predicted is what its ranks have in the mean.
    """
    async with Engines(1, data_parallel_size=2) as engines, on_stage(*engines) as stage:
        for num_steps in range(1, 5):
            explained = (await stage.admin("/admin/explain?api=responses", asked(num_steps))).json()
            held = [each["view"]["num_gpu_tokens"] for each in explained["candidates"]]
            reply = await ask(stage, asked(num_steps))
            await stage.knows(*engines)
            assert held[0] == held[1] == reply.predicted
            if num_steps == 2:  # one rank has the first
                assert 0 < reply.predicted < usage_of(reply)["input_tokens"] // 2 + 16

        assert stage.metric("warmroute_audited_total") == 0
        assert stage.metric("warmroute_trust_ratio", replica="r1#0") in (0.0, 1.0)


async def test_from_0_33_on_the_rank_is_the_routers_choice() -> None:
    """So each rank is predicted for itself, and its reports count."""
    options = {"data_parallel_size": 2, "version": "0.33.0"}
    async with Engines(1, **options) as engines, on_stage(*engines) as stage:
        for num_steps in range(1, 5):
            reply = await ask(stage, asked(num_steps))
            await stage.knows(*engines)
            assert reply.predicted == usage_of(reply)["input_tokens_details"]["cached_tokens"]

        assert reply.predicted > 0
        assert stage.metric("warmroute_audited_total") == 4


async def test_what_is_not_understood_is_the_engines_to_answer() -> None:
    """It is forwarded unchanged, and counted."""
    unknown: list[Json] = [
        {"input": [{"type": "unheard_of"}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": []},
        {"tools": None},
        {"background": True},
    ]
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for fields in unknown:
            assert (await stage.ask(asked() | fields, PATH)).status == 400, fields

        assert stage.metric("warmroute_requests_total", api="responses") == len(unknown)
        assert stage.metric("warmroute_refused_total") == 0


async def test_it_is_explained(tmp_path: Path) -> None:
    """The dry run reports the tokens that the engine computes."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        reply = await ask(stage, asked())
        explained = (await stage.admin("/admin/explain", asked())).json()
        named = (await stage.admin("/admin/explain?api=responses", asked())).json()

        assert explained["num_tokens"] == named["num_tokens"] == usage_of(reply)["input_tokens"]
        assert explained["way"] == "local"
