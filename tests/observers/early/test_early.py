"""The known beginning of the next prompt is computed before the client comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.engine_model.time_model import TimeModel
from router.observers.early import early as early_module
from router.observers.early.early import Early
from tests.faults.stage import (
    SLOW,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    on_stage,
    on_stages,
    words,
)
from tests.redis_servers import Start

EARLY = '"prompt":['  # only a prompt of ids has this in its body
LONG_PREFILL = TimeModel(ms_per_prefill_token=0.5)  # a beginning takes half a second


def chat_body(items: Sequence[tuple[str, str]], **fields: Any) -> Json:
    """Write a conversation for the chat API; reasoning goes with the call behind it."""
    messages: list[Json] = []
    for number, (kind, text) in enumerate(items):
        match kind:
            case "user" | "assistant":
                messages.append({"role": kind, "content": text})
            case "call":
                call = {"name": "ls", "arguments": "{}"}
                messages.append(
                    {
                        "role": "assistant",
                        "content": "",
                        "reasoning": text,
                        "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
                    }
                )
            case "result":
                called = f"c{number - 1}"
                messages.append({"role": "tool", "tool_call_id": called, "content": text})
    return {"model": "tiny", "messages": messages, "max_tokens": 400} | fields


def message_body(items: Sequence[tuple[str, str]], **fields: Any) -> Json:
    """Write the same for the Messages API."""
    messages: list[Json] = []
    for number, (kind, text) in enumerate(items):
        match kind:
            case "user" | "assistant":
                messages.append({"role": kind, "content": [{"type": "text", "text": text}]})
            case "call":
                thinking = {"type": "thinking", "thinking": text, "signature": ""}
                call = {"type": "tool_use", "id": f"c{number}", "name": "ls", "input": {}}
                messages.append({"role": "assistant", "content": [thinking, call]})
            case "result":
                result = {"type": "tool_result", "tool_use_id": f"c{number - 1}", "content": text}
                messages.append({"role": "user", "content": [result]})
    return {"model": "tiny", "messages": messages, "max_tokens": 400} | fields


def response_body(items: Sequence[tuple[str, str]], **fields: Any) -> Json:
    """Write the same for the Responses API."""
    written: list[Json] = []
    for number, (kind, text) in enumerate(items):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "ls", "arguments": "{}"}
        thought = {"type": "reasoning_text", "text": text}
        match kind:
            case "user":
                part = {"type": "input_text", "text": text}
                written.append({"type": "message", "role": "user", "content": [part]})
            case "assistant":
                part = {"type": "output_text", "text": text, "annotations": []}
                written.append({"type": "message", "role": "assistant", "content": [part]})
            case "call":
                written.append({"type": "reasoning", "summary": [], "content": [thought]})
                written.append(call)
            case "result":
                called = {"call_id": f"c{number - 1}", "output": text}
                written.append({"type": "function_call_output", **called})
    return {"model": "tiny", "input": written, "max_output_tokens": 400} | fields


APIS = {
    "/v1/chat/completions": chat_body,
    "/v1/messages": message_body,
    "/v1/responses": response_body,
}
LOOP = [
    ("user", words(0)),
    *[(kind, words(10 * n + k)) for n in (1, 2, 3) for k, kind in enumerate(("call", "result"))],
]
"""A message of the user, and calls of tools with reasoning."""


def text_of(reply: Reply) -> str:
    """Read what a whole or streamed answer of any API says."""
    if not reply.headers["Content-Type"].startswith("text/event-stream"):
        return _text_in(reply.json())
    said = ""
    for event in reply.events:
        if event == "[DONE]":
            continue
        if event.get("type") == "response.completed":
            return _text_in(event["response"])
        if event.get("type") == "content_block_delta":
            said += event["delta"]["text"]
        said += "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
    return said


def _text_in(answer: Json) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return str(answer["output"][-1]["content"][0]["text"])
    return str(answer["content"][0]["text"])


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are short."""
    monkeypatch.setattr(early_module, "LEAST_TOKENS", 64)


async def early(stage: Stage, engine: Emulator, result: str = "computed", number: int = 1) -> None:
    """Wait until the router has done something early so often."""
    await stage.until(lambda: stage.metric("warmroute_early_total", result=result) >= number)
    await stage.settled(engine)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_next_turn_finds_all_but_its_message_cached(path: str, is_stream: bool) -> None:
    """Though its prompt differs from the last one behind the first reasoning."""
    fields = {"stream": True} if is_stream else {}
    async with Engines(1) as [engine], on_stage(engine) as stage:
        first = await stage.ask(APIS[path](LOOP, **fields), path)
        await early(stage, engine)
        items = [*LOOP, ("assistant", text_of(first)), ("user", "And now?")]
        second = await stage.ask(APIS[path](items), path)

        num_sent = stage.metric("warmroute_early_tokens_total", kind="sent")
        assert num_sent > 500
        assert second.predicted > first.predicted + num_sent
        assert stage.metric("warmroute_early_tokens_total", kind="used") == num_sent
        assert stage.metric("warmroute_early_tokens_total", kind="wasted") == 0
        num_audited = stage.metric("warmroute_audited_total")
        assert num_audited == stage.metric("warmroute_audited_total", result="exact") >= 1


async def test_switched_off_nothing_is_computed_early() -> None:
    """The next turn computes what is behind the first reasoning."""
    async with Engines(1) as [engine], on_stage(engine, early__mode="off") as stage:
        first = await stage.ask(chat_body(LOOP))
        await stage.settled(engine)
        items = [*LOOP, ("assistant", text_of(first)), ("user", "And now?")]
        second = await stage.ask(chat_body(items))

        assert second.usage["prompt_tokens"] - second.reported > 500
        assert stage.router.observer(Early) is None


async def test_a_salt_goes_with_it() -> None:
    """What is computed early is found by the same tenant's prompt only."""
    async with Engines(1) as [engine], on_stage(engine) as stage:
        first = await stage.ask(chat_body(LOOP, cache_salt="mine"))
        await early(stage, engine)
        items = [*LOOP, ("assistant", text_of(first)), ("user", "And now?")]
        others = await stage.ask(chat_body(items, cache_salt="other"))
        own = await stage.ask(chat_body(items, cache_salt="mine"))

        assert others.reported == 0
        assert own.usage["prompt_tokens"] - own.reported < 64


@pytest.mark.parametrize(
    ("items", "fields"),
    [
        pytest.param([("user", words(0, num_words=300))], {}, id="without reasoning"),
        pytest.param(LOOP, {"prompt_logprobs": 0}, id="a request that reads no cache"),
        pytest.param(LOOP, {"max_tokens": 4}, id="an answer that is cut off"),
    ],
)
async def test_what_goes_on_as_it_was_or_may_not_is_not_followed(
    items: list[tuple[str, str]], fields: Json
) -> None:
    """Nor is it computed again after its engine was restarted; a client may continue a cut one."""
    async with Engines(1, reply_tokens=50) as [engine], on_stage(engine) as stage:
        await stage.ask(chat_body(items, **fields))
        await stage.ask(chat_body(LOOP), headers={"X-Session-ID": "another"})
        await early(stage, engine)

        assert stage.metric("warmroute_early_total") == 1


async def test_what_the_replica_has_lost_is_not_computed() -> None:
    """Only what the template changed is: the prompt itself is the next request's work."""
    async with Engines(1) as [engine], on_stage(engine) as stage:
        await stage.ask(chat_body(LOOP))
        [candidate] = stage.router.fleet.members.states
        stage.router.caches.index.clear(candidate)
        await early(stage, engine, "lost")

        assert stage.metric("warmroute_early_tokens_total", kind="sent") == 0


async def test_a_finished_session_gets_nothing_computed() -> None:
    """Neither if it ends before its replica is idle, nor if its last answer still runs."""
    async with Engines(1) as [engine], on_stage(engine) as stage:
        for number in range(5):
            own = {"X-Session-ID": f"s{number}"}
            await stage.ask(chat_body(LOOP), headers=own)
            await stage.ask({}, f"/finish_session?session_id=s{number}")
        await stage.ask(chat_body(LOOP), headers={"X-Session-ID": "another"})
        await early(stage, engine)

        assert stage.metric("warmroute_early_total") == 1


async def test_an_engine_without_prefix_caching_gets_nothing_early() -> None:
    async with Engines(1, enable_prefix_caching=False) as [engine], on_stage(engine) as stage:
        for number in range(3):
            await stage.ask(chat_body(LOOP), headers={"X-Session-ID": f"s{number}"})
        observer = stage.router.observer(Early)

        assert observer is not None
        assert observer.held.num_bytes == 0
        assert stage.metric("warmroute_early_total") == 0


async def test_a_request_cuts_it_and_it_is_done_later() -> None:
    """A request does not wait behind what is computed early."""
    async with (
        Engines(1, time_model=LONG_PREFILL, max_num_batched_tokens=64) as [engine],
        on_stage(engine) as stage,
    ):
        await stage.ask(chat_body(LOOP))
        await stage.until(lambda: stage.metric("warmroute_early_tokens_total", kind="sent"))
        other = await stage.ask(chat(words(7)), headers={"X-Session-ID": "another"})
        await early(stage, engine, "cut")
        assert other.status == 200
        await early(stage, engine)

        assert stage.metric("warmroute_early_total", result="cut") == 1


async def test_what_was_computed_before_a_cut_is_used() -> None:
    """A conversation that goes on meanwhile finds the pieces so far, and they count."""
    slow = TimeModel(ms_per_prefill_token=1.0)
    async with (
        Engines(1, time_model=slow, max_num_batched_tokens=64) as [engine],
        on_stage(engine) as stage,
    ):
        first = await stage.ask(chat_body(LOOP))
        await stage.until(lambda: stage.metric("warmroute_early_tokens_total", kind="sent"))
        num_first = stage.metric("warmroute_early_tokens_total", kind="sent")
        await stage.until(
            lambda: stage.metric("warmroute_early_tokens_total", kind="sent") > num_first
        )
        items = [*LOOP, ("assistant", text_of(first)), ("user", "And now?")]
        second = await stage.ask(chat_body(items))
        num_sent = stage.metric("warmroute_early_tokens_total", kind="sent")
        num_used = stage.metric("warmroute_early_tokens_total", kind="used")

        assert stage.metric("warmroute_early_total", result="cut") == 1
        assert num_first <= num_used < num_sent
        assert second.predicted >= first.predicted + num_used
        assert stage.metric("warmroute_early_tokens_total", kind="wasted") == 0


async def test_a_wrong_prediction_is_not_repeated() -> None:
    """A client that rewrites its history gets nothing computed early any more."""
    async with Engines(1) as [engine], on_stage(engine) as stage:
        await stage.ask(chat_body(LOOP))
        await early(stage, engine)
        compacted = [*LOOP[:1], ("call", "short"), ("result", words(50)), *LOOP[3:]]
        await stage.ask(chat_body([*compacted, ("assistant", "so"), ("user", "And now?")]))
        await stage.ask(chat_body(LOOP), headers={"X-Session-ID": "another"})
        await early(stage, engine, "cached")

        assert stage.metric("warmroute_early_total") == 2
        assert stage.metric("warmroute_early_tokens_total", kind="used") < 64
        assert stage.metric("warmroute_early_tokens_total", kind="wasted") > 500


async def test_a_model_that_is_refused_rests() -> None:
    """Its replica stays in service for requests."""
    async with Engines(1) as [engine], on_stage(engine) as stage:
        arm(engine, "status", status=404, text=EARLY)
        for number in range(2):
            reply = await stage.ask(chat_body(LOOP), headers={"X-Session-ID": f"s{number}"})
            await early(stage, engine, "refused")

        assert reply.status == 200
        assert stage.metric("warmroute_early_total") == 1
        assert "replica refuses to compute early" in stage.log


@pytest.mark.parametrize("status", [503, 429])
async def test_a_replica_that_is_busy_is_asked_again_soon(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After seconds, for the same conversation."""
    monkeypatch.setattr(early_module, "BUSY_S", 0.1)
    async with Engines(1) as [engine], on_stage(engine) as stage:
        arm(engine, "status", status=status, text=EARLY, count=1)
        await stage.ask(chat_body(LOOP))
        await early(stage, engine, "busy")
        await early(stage, engine)


async def test_pieces_go_by_the_time_of_pieces() -> None:
    """Though no client streams, and so the time of a prompt is not known."""
    slow = TimeModel(ms_per_prefill_token=0.2)
    async with Engines(1, time_model=slow) as [engine], on_stage(engine) as stage:
        long = [(kind, words(10 * n + k, num_words=600)) for n in (1, 2, 3)
                for k, kind in enumerate(("call", "result"))]  # fmt: skip
        await stage.ask(chat_body([("user", words(0)), *long]))
        await early(stage, engine)
        num_sent = stage.metric("warmroute_early_tokens_total", kind="sent")
        [rank] = engine.replica.ranks
        num_pieces = sum(rank.stats.finished.values()) - 1

        assert num_sent > 2_000
        assert num_sent / num_pieces <= 400  # 256 tokens take 51 ms


async def test_a_full_cache_is_left_alone() -> None:
    """Conversations that live there are worth more."""
    async with Engines(1, num_gpu_blocks=160) as [engine], on_stage(engine) as stage:
        for number in range(3):
            own = {"X-Session-ID": f"s{number}"}
            first = await stage.ask(chat(words(60 + number, num_words=150)), headers=own)
            turns = (words(60 + number, num_words=150), first.text, words(70))
            await stage.ask(chat(*turns), headers=own)
        await stage.ask(chat_body(LOOP))
        await early(stage, engine, "no_room")

        assert stage.metric("warmroute_early_tokens_total", kind="sent") == 0


async def test_it_ends_with_the_router() -> None:
    """What is computed early when the router ends is cut."""
    async with Engines(1, time_model=SLOW) as [engine]:
        async with on_stage(engine) as stage:
            await stage.ask(chat_body(LOOP))
        assert stage.metric("warmroute_early_total", result="failed") == 0


async def test_a_conversation_that_moved_to_another_router_is_dropped(start_redis: Start) -> None:
    """Its next turn is there already: the beginning would be of no use."""
    async with (
        Engines(1, time_model=LONG_PREFILL, max_num_batched_tokens=64) as [engine],
        on_stages(engine, redis=start_redis("7")) as (first, second),
    ):
        reply = await first.ask(chat_body(LOOP))
        await first.until(lambda: first.metric("warmroute_early_tokens_total", kind="sent"))
        items = [*LOOP, ("assistant", text_of(reply)), ("user", "And now?")]
        await second.ask(chat_body(items))
        observer = first.router.observer(Early)
        assert observer is not None
        await first.until(lambda: observer.held.num_bytes == 0)

        assert first.metric("warmroute_early_total", result="cut") == 1
        assert first.metric("warmroute_early_total", result="computed") == 0
