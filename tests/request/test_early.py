"""The known beginning of the next prompt is computed before the client comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.stage import Engines, Stage, on_stage, streamed, words

Json = dict[str, Any]
ON = {"early__mode": "on", "early__min_tokens": 64}


def looped(num_calls: int = 3) -> list[Json]:
    """A message of the user, and calls of tools with reasoning."""
    messages: list[Json] = [{"role": "user", "content": words(0)}]
    for number in range(num_calls):
        call = {"name": "read_file", "arguments": "{}"}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning": f"It may be number {number}.",
                "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"c{number}", "content": words(number + 1)},
        ]
    return messages


def body(messages: list[Json], **fields: Any) -> Json:
    return streamed({"model": "tiny", "messages": messages, "max_tokens": 400}) | fields


async def said(stage: Stage, messages: list[Json]) -> list[Json]:
    """Have an answer, and return the conversation with it."""
    reply = await stage.ask(body(messages))
    pieces = [
        choice["delta"].get("content") or ""
        for event in reply.events
        if event != "[DONE]"
        for choice in event["choices"]
    ]
    finish = [c["finish_reason"] for e in reply.events if e != "[DONE]" for c in e["choices"]]
    assert finish[-1] == "stop"
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


@pytest.mark.parametrize("is_on", [False, True])
async def test_what_follows_reasoning_is_computed_early(is_on: bool) -> None:
    """The next turn finds all of it cached but the new message."""
    async with Engines(1) as (engine,), on_stage(engine, **(ON if is_on else {})) as stage:
        messages = await said(stage, looped())
        if is_on:
            await stage.until(lambda: stage.metric("warmroute_early_total", result="computed"))
            await stage.settled(engine)
        messages.append({"role": "user", "content": "And now?"})
        reply = await stage.ask(body(messages))

        num_new = reply.usage["prompt_tokens"] - reply.reported
        assert (num_new < 64) is is_on
        print(num_new, reply.usage)
