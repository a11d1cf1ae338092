"""router.api.anthropic: a Messages body as the chat that vLLM makes of it; what usage says.

The ids that come of it are held against vLLM's in tests/tokens/test_golden.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.api.anthropic import parse_count, parse_messages, usage_of_message, usage_of_messages
from router.api.engine_bodies import tokenize_chat
from router.api.openai import ChatRequest
from router.base.errors import BadRequest

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BILLING = "x-anthropic-billing-header: cch=1;"


def parsed(messages: Any = HI, **fields: Any) -> ChatRequest:
    return parse_messages({"model": "m", "max_tokens": 9, "messages": messages, **fields})


def of_user(*blocks: dict[str, Any]) -> list[Any]:
    return list(parsed([{"role": "user", "content": list(blocks)}]).messages)


def of_assistant(*blocks: dict[str, Any]) -> list[Any]:
    return list(parsed([{"role": "assistant", "content": list(blocks)}]).messages)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("be brief", "be brief"),
        ([text("be "), text(""), text("brief")], "be brief"),
        ([text(BILLING), text("be brief")], "be brief"),
        (BILLING + "\nbe brief", BILLING + "\nbe brief"),  # the chat path takes its line out
        ([text(BILLING)], None),
        ("", None),
        ([], None),
        (None, None),
    ],
)
def test_system_blocks_become_one_message(system: Any, content: str | None) -> None:
    """Joined with nothing between; a billing header is no part of it."""
    messages = parsed(system=system).messages

    expected = [] if content is None else [{"role": "system", "content": content}]
    assert list(messages) == [*expected, *HI]


def test_reminders_stay_in_their_place() -> None:
    """A system message between others stays one, and is dropped if it has no text."""
    reminder = {"role": "system", "content": "remember"}
    empty = {"role": "system", "content": [text(BILLING), text("")]}
    request = parsed([*HI, empty, reminder, *HI])

    assert list(request.messages) == [*HI, reminder, *HI]
    assert request.has_inline_system
    assert not parsed(system="s").has_inline_system


def test_results_come_before_what_their_message_says() -> None:
    """Each a tool message; its images in a user message behind it."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    converted = of_user(
        text("and now?"),
        {"type": "tool_result", "tool_use_id": "a", "content": [text("1"), image, text("2")]},
        {"type": "tool_result", "tool_use_id": "b", "content": "3", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
    )

    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert converted == [
        {"role": "tool", "tool_call_id": "a", "content": "1\n2"},
        {"role": "user", "content": [url]},
        {"role": "tool", "tool_call_id": "b", "content": "3"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


def test_an_assistants_blocks_are_one_message() -> None:
    """Thinking is joined, calls get their arguments as JSON, what is redacted leaves no trace."""
    converted = of_assistant(
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "b"},
        text("so"),
        {"type": "tool_use", "id": "t", "name": "f", "input": {"é": 1}},
    )

    function = {"name": "f", "arguments": '{"\\u00e9": 1}'}
    calls = [{"id": "t", "type": "function", "function": function}]
    assert converted == [
        {"role": "assistant", "reasoning": "ab", "tool_calls": calls, "content": "so"}
    ]


def test_messages_without_anything() -> None:
    """An empty message of a user is dropped, one of the assistant is kept."""
    assert of_user() == []
    assert of_assistant(text("")) == [{"role": "assistant"}]


def test_several_texts_are_parts() -> None:
    """Of the user and of the assistant alike, without what the engine ignores."""
    parts = [text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}]

    assert of_user(*parts) == [{"role": "user", "content": [text("a"), text("b")]}]


def test_tools_are_the_chats() -> None:
    """Known fields, in the models' order; a schema without a type is an object's."""
    tool = {"input_schema": {"x": 1}, "name": "f", "cache_control": {}, "type": "custom"}
    request = parsed(tools=[tool])

    assert request.tools is not None
    assert request.tools[0]["function"] == {
        "name": "f",
        "description": None,
        "parameters": {"x": 1, "type": "object"},
        "strict": None,
        "defer_loading": None,
    }
    assert request.tool_choice == "auto"
    assert parsed().tool_choice is None
    assert parsed(tools=[tool], tool_choice={"type": "any"}).tool_choice == "required"


def test_tools_are_those_of_the_end() -> None:
    """What blocks of system messages add and remove, in the order of the first declaration."""
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in "abc"]

    def change(kind: str, name: str, definition: Any = None) -> dict[str, Any]:
        tool = {"type": "tool_reference", "name": name}
        if definition is not None:
            tool = {"type": "tool_definition", "definition": definition}
        return {"type": f"tool_{kind}", "tool": tool}

    def names(*changes: dict[str, Any]) -> list[Any]:
        request = parsed([*HI, {"role": "system", "content": list(changes)}], tools=tools)
        assert request.engine_only is None
        functions = [tool["function"] for tool in request.tools or ()]
        return [(function["name"], function["defer_loading"]) for function in functions]

    new = {"name": "d", "input_schema": {}}
    assert names(change("removal", "b"), change("addition", "c"), change("addition", "d", new)) == [
        ("a", True),
        ("c", None),
        ("d", None),
    ]
    assert names(change("removal", "a"), change("addition", "a"))[0] == ("a", None)


@pytest.mark.parametrize(
    ("fields", "effort", "is_disabled"),
    [
        ({}, None, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, None, False),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high", False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", True),
    ],
)
def test_thinking_is_an_effort(fields: Any, effort: str | None, is_disabled: bool) -> None:
    """Disabled thinking becomes the effort `none`, or what the template makes of that."""
    request = parsed(**fields)

    assert (request.reasoning_effort, request.is_thinking_disabled) == (effort, is_disabled)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "block"),
        ({"messages": [{"role": "user", "content": None}]}, "block"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "block"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "block"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
            "tool_use.id",
        ),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
    ],
)
def test_what_is_not_known_is_the_engines(fields: Any, why: str) -> None:
    """The router raises no error: the engine accepts it, or refuses it in its own words."""
    assert parsed(**fields).engine_only == why


def test_what_came_before_the_unknown_is_kept() -> None:
    """A conversation without a session id is then still recognized by its first turn."""
    odd = {"role": "user", "content": [{"type": "document"}]}

    assert list(parsed([*HI, odd]).messages) == HI


def test_inputs_nested_too_deep_are_the_engines() -> None:
    """A thousand brackets are left to the engine, also where Python raises RecursionError."""
    deep: Any = 1e300
    for _ in range(5_000):
        deep = [deep]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": deep}}

    assert parsed([{"role": "assistant", "content": [call]}]).engine_only == "depth"


def test_an_input_beyond_64_bits_is_the_engines() -> None:
    """Our decoder reads it as a float, the engine's keeps it whole."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": float(2**70)}}

    assert parsed([{"role": "assistant", "content": [call]}]).engine_only == "number"


@pytest.mark.parametrize("fields", [{"model": 5}, {"stream": "perhaps"}, {"cache_salt": 1}])
def test_what_routing_needs_is_checked(fields: Any) -> None:
    """A clear 400 that names the field."""
    with pytest.raises(BadRequest) as caught:
        parsed(**fields)

    assert caught.value.param == next(iter(fields))


def test_counting_knows_fewer_fields() -> None:
    """Fields that matter only for generating are not checked."""
    request = parse_count({"model": "m", "messages": HI, "cache_salt": 5, "stream": 7})

    assert list(request.messages) == HI
    assert request.engine_only is None


def test_an_engine_can_tokenize_what_was_converted() -> None:
    """The body for its `/tokenize` route has the fields of a chat."""
    request = parsed(system="s", thinking={"type": "disabled"}, tools=[])

    assert tokenize_chat(request) == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, *HI],
        "tools": [],
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "none"},
    }


START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"a","usage":'
    b'{"input_tokens":90,"output_tokens":0}}}\n\n'
)
DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"input_tokens":20,"output_tokens":5,"cache_creation_input_tokens":6,'
    b'"cache_read_input_tokens":64}}\n\n'
)
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def test_usage_of_a_stream_is_that_of_its_end() -> None:
    """The prompt is what was read from a cache, what was written to one, and the rest."""
    usage = usage_of_messages(START + DELTA + STOP)

    assert usage is not None
    assert (usage.prompt_tokens, usage.num_cached_tokens, usage.completion_tokens) == (90, 64, 5)
    assert usage_of_messages(START + STOP) is None


def test_usage_of_an_answer() -> None:
    """Without the engine's flag the answer does not report cached tokens."""
    usage = usage_of_message(b'{"content":[],"usage":{"input_tokens":7,"output_tokens":1}}')

    assert usage is not None
    assert (usage.prompt_tokens, usage.num_cached_tokens) == (7, None)
    assert usage_of_message(b'{"usage":{"input_tokens":null}}') is None
    assert usage_of_message(b"{") is None
