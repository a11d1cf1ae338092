"""A Responses request as a chat, rule by rule; token ids: tests/tokens/test_golden.py.

Ids of responses, in requests and in answers.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from router.api.responses import is_kept, issued_in, named_in, parse_responses
from tests.api.samples import bodies


def _messages(*items: dict[str, Any], **body: Any) -> Any:
    parsed = parse_responses({"input": list(items), **body})
    assert parsed.engine_only is None
    return parsed.messages


def test_a_text_is_a_users_message() -> None:
    """Instructions come first, as the system's message."""
    parsed = parse_responses({"model": "m", "input": "hi", "instructions": "be brief"})

    assert parsed.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (parsed.model, parsed.tools, parsed.add_generation_prompt) == ("m", None, True)


def test_a_step_of_an_agent_is_one_message() -> None:
    """Reasoning, text and calls that follow one another are one message of the assistant."""
    messages = _messages(
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "so"}, {"type": "output_text", "text": ""}],
        },
        {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "g", "call_id": "2", "input": 'ä"'},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "two"}],
        },
    )

    assert messages == [
        {
            "role": "assistant",
            "reasoning": "h",
            "content": "so",
            "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "{}"}, "type": "function"},
                {
                    "id": "2",
                    "function": {"name": "g", "arguments": '{"input": "ä\\""}'},
                    "type": "function",
                },
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "two"}], "tool_call_id": "2"},
    ]


def test_what_the_assistant_has_already_begins_another_message() -> None:
    """Two texts in a row become two messages."""
    messages = _messages(
        {"role": "assistant", "content": "one"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "two"},
    )

    assert messages == [
        {"role": "assistant", "content": "one", "reasoning": "hm"},
        {"role": "assistant", "content": "two"},
    ]


def test_tools_are_shown_as_functions() -> None:
    """A namespace is flattened, a custom tool takes a text, what is no function is left out."""
    tools: list[Any] = [
        {"type": "function", "name": "f", "parameters": {"a": 1}, "strict": True},
        {
            "type": "namespace",
            "name": "ns",
            "description": "",
            "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "no"}],
        },
        {"type": "custom", "name": "c", "description": "free", "defer_loading": True},
        {"type": "web_search"},
    ]
    shown = parse_responses({"input": "hi", "tools": tools}).tools

    assert shown is not None
    assert [tool["function"]["name"] for tool in shown] == ["f", "ns__g", "c"]
    assert shown[0]["function"] == {"name": "f", "parameters": {"a": 1}, "strict": True}
    assert shown[2]["function"]["parameters"]["required"] == ["input"]
    assert "defer_loading" not in shown[2]["function"]
    assert parse_responses({"input": "hi", "tools": tools[3:]}).tools == []
    assert parse_responses({"input": "hi", "tools": []}).tools is None


def test_an_open_message_at_the_end_is_continued() -> None:
    """A last message whose status is `in_progress` is continued."""
    item = {"role": "assistant", "content": "so", "status": "in_progress"}
    parsed = parse_responses({"input": [{"role": "user", "content": "hi"}, item]})

    assert (parsed.continue_final_message, parsed.add_generation_prompt) == (True, False)


def said(**fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": "so", **fields}
    return {"type": "message", "role": "assistant", "content": [part]}


def test_images() -> None:
    """An image is one of a chat; what else its part says stays for the template."""
    image = {"type": "input_image", "image_url": "data:x", "detail": "low", "file_id": None}

    [message] = parse_responses({"input": [{"role": "user", "content": [image]}]}).messages

    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:x"}, "detail": "low"}
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted_content"),
        ({"input": [{"type": "unheard_of"}]}, "item"),
        ({"input": [{"type": "reasoning", "summary": [], "role": "assistant"}]}, "item"),
        ({"input": [said(logprobs=[1])]}, "part"),
        ({"input": [said(annotations=[5])]}, "part"),
        ({"input": []}, "input"),
        ({}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "images",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "part"),
        ({"input": "hi", "tools": None}, "tools"),
        ({"input": "hi", "media_io_kwargs": {}}, "media_io_kwargs"),
    ],
)
def test_what_is_not_certain_is_for_the_engine(body: dict[str, Any], reason: str) -> None:
    """The request is forwarded unchanged, and a word says why its tokens are unknown."""
    assert parse_responses(body).engine_only == reason


def test_fields_for_the_router() -> None:
    """The view has the limits of the answer, and whether the engine truncates a long prompt."""
    parsed = parse_responses(
        {"input": "hi", "max_output_tokens": 7, "stream": True, "truncation": "auto"}
    )

    assert (parsed.max_tokens, parsed.stream, parsed.truncates) == (7, True, True)


@given(bodies)
def test_no_body_is_an_error(body: dict[str, Any]) -> None:
    """Any JSON can be viewed; the engine decides whether it is valid."""
    assert parse_responses(body).renders_as == "responses"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses/resp_1", None, "resp_1"),
        ("/v1/responses/resp_1/cancel", None, "resp_1"),
        ("/v1/responses/resp_1/input_items", None, "resp_1"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/responses", {"previous_response_id": "no id\n"}, None),
        ("/v1/responses", {"previous_response_id": 5}, None),
        ("/v1/responses", {}, None),
        ("/v1/chat/completions", {"previous_response_id": "resp_1"}, None),
    ],
)
def test_a_request_names_a_response(path: str, body: Any, named: str | None) -> None:
    """In its path, or as the one that it goes on from."""
    assert named_in(path, body) == named


@pytest.mark.parametrize(
    ("beginning", "is_stream", "issued"),
    [
        (b'{"id":"resp_1","object":"response"}', False, "resp_1"),
        (b' { "id" : "resp_1"', False, "resp_1"),
        (b'{"error":{"id":"resp_1"}}', False, None),
        (b"", False, None),
        (
            b'event: response.created\ndata: {"response":{"id":"resp_1","tools":[]},"type":"res',
            True,
            "resp_1",
        ),
        (b'data: {"type":"error"}\n\n', True, None),
    ],
)
def test_an_answer_brings_an_id(beginning: bytes, is_stream: bool, issued: str | None) -> None:
    """At its head, whole or not."""
    assert issued_in(beginning, is_event_stream=is_stream) == issued


def test_what_an_engine_may_keep() -> None:
    """All but those with `store: false`, and those whose id the client chose."""
    assert is_kept({})
    assert is_kept({"store": None})
    assert not is_kept({"store": False})
    assert not is_kept({"request_id": "resp_mine"})
