"""The Responses API of an emulated replica, through the openai client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS

OPTIONS = EmulatorOptions(num_gpu_blocks=600, max_model_len=8192, time_model=PRESETS["instant"])
HELLO = "hello there " * 40
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "read_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    }
]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        Emulator(OPTIONS) as replica,
        openai.AsyncOpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_stream_says_the_same_as_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    """In vLLM's order; the usage comes with the last event, and counts what the cache had."""
    asked: dict[str, Any] = {"model": "tiny", "input": HELLO, "max_output_tokens": 20}
    whole = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(**asked, stream=True)]

    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert (last.response.status, whole.status) == ("incomplete", "incomplete")
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.input_tokens == whole.usage.input_tokens
    assert last.response.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_made_on_request(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Its arguments parse, and its result goes on from it."""
    asked: dict[str, Any] = {"model": "tiny", "input": HELLO, "tools": TOOLS}
    made = await client.responses.create(**asked, tool_choice="required", stream=stream)
    if stream:
        *_, last = [event async for event in made]
        made = last.response
    (call,) = made.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    items: list[Any] = [{"role": "user", "content": HELLO}, call.model_dump(), result]

    answered = await client.responses.create(model="tiny", input=items, tools=TOOLS)

    assert (call.type, call.name) == ("function_call", "read_file")
    assert answered.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_has_the_namespace_of_its_function(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """As vLLM splits the name that the model sees."""
    tools: Any = [{"type": "namespace", "name": "files_v1", "description": "", "tools": TOOLS}]
    made: Any = await client.responses.create(
        model="tiny", input=HELLO, tools=tools, tool_choice="required", stream=stream
    )
    if stream:
        *_, last = [event async for event in made]
        made = last.response
    (call,) = made.output

    assert (call.namespace, call.name) == ("files_v1", "read_file")


async def test_what_vllm_refuses_is_refused(client: openai.AsyncOpenAI) -> None:
    """An item of an unknown type, encrypted reasoning, an earlier response: none is kept."""
    items: list[Any] = [
        [{"type": "unheard_of"}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
    ]
    for given in items:
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input=given)
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not emulated"):
        await client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
