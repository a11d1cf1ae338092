"""What a request must look like, and the error where it does not."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from router.api.engine_bodies import tokenize_body
from router.api.openai import parse_chat, parse_completion
from router.base.errors import BadRequest

HELLO = [{"role": "user", "content": "hello"}]


def test_chat_defaults() -> None:
    """What is absent is what the engine takes it for."""
    request = parse_chat({"messages": HELLO, "model": "m"})

    assert request.messages is HELLO
    assert (request.model, request.tools, request.n, request.stream) == ("m", None, 1, False)
    assert request.add_generation_prompt
    assert not request.continue_final_message
    assert not request.add_special_tokens
    assert request.engine_only is None


def test_chat_fields() -> None:
    """All fields that decide the prompt are read; unknown ones are left alone."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = parse_chat(
        {
            "messages": HELLO,
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "documents": [{"title": "t"}],
            "reasoning_effort": "low",
            "add_generation_prompt": "no",
            "continue_final_message": 1,
            "chat_template": "{{ x }}",
            "chat_template_kwargs": {"enable_thinking": False},
            "cache_salt": "s",
            "max_tokens": " 5",
            "n": 2.0,
            "stream": None,
            "stream_options": {"include_usage": True},
            "unheard_of": object(),
        }
    )

    assert request.tools == tools
    assert request.documents == [{"title": "t"}]
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    assert (request.max_tokens, request.n, request.stream) == (5, 2, False)


@pytest.mark.parametrize(
    ("fields", "chat_reads", "completion_reads"),
    [
        ({}, True, True),
        ({"prompt_logprobs": None, "logprobs": None}, True, True),
        ({"prompt_logprobs": 0}, False, False),
        ({"prompt_logprobs": 3}, False, False),
        ({"logprobs": 2}, True, True),
        ({"echo": True}, False, True),
        ({"echo": True, "top_logprobs": None}, True, True),
        ({"echo": "yes", "logprobs": 2}, False, False),
        ({"echo": False, "logprobs": 2, "top_logprobs": 2}, True, True),
    ],
)
def test_whether_the_cache_is_read(
    fields: dict[str, Any], chat_reads: bool, completion_reads: bool
) -> None:
    """An engine that is asked how likely the prompt is computes all of it."""
    assert parse_chat({"messages": HELLO, **fields}).reads_cache is chat_reads
    assert parse_completion({"prompt": "x", **fields}).reads_cache is completion_reads


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {}}, "media_io_kwargs"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (
            {"kv_transfer_params": {"prompt_token_ids": [1]}},
            "kv_transfer_params.prompt_token_ids",
        ),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, None),
        ({"tools": []}, "tools"),
        ({"tools": None}, None),
        ({"stop": []}, None),
        ({"tool_choice": "auto"}, None),
        ({"stream": 0.0}, None),
    ],
)
def test_engine_only(fields: dict[str, Any], reason: str | None) -> None:
    """What cannot be rendered here is named, not refused."""
    assert parse_chat({"messages": HELLO, **fields}).engine_only == reason


def test_an_object_for_parts_is_the_engines() -> None:
    """vLLM takes one for the list of its keys: forwarded, and counted."""
    messages = [{"role": "user", "content": {}}]

    assert parse_chat({"messages": messages}).engine_only == "content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [*HELLO, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": 5}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"model": 5}, "model"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": None}}]}, "tools[0].function.name"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"documents": "d"}, "documents"),
        ({"chat_template": {}}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": None}, "add_generation_prompt"),
        ({"add_generation_prompt": "perhaps"}, "add_generation_prompt"),
        ({"continue_final_message": []}, "continue_final_message"),
        ({"stream": "sometimes"}, "stream"),
        ({"max_tokens": "five"}, "max_tokens"),
        ({"max_tokens": "nan"}, "max_tokens"),
        ({"n": 1.5}, "n"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_chat_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    """A wrong field is refused with its path, the allowed types and what came instead."""
    with pytest.raises(BadRequest) as caught:
        parse_chat({"messages": HELLO, **fields})

    assert caught.value.param == param
    assert f"`{param}` must" in caught.value.message


def test_missing_is_reported_as_missing() -> None:
    """A field that is not there is not called null."""
    with pytest.raises(BadRequest, match="`messages` must be a list of objects; it is missing"):
        parse_chat({"model": "m"})
    with pytest.raises(BadRequest, match="got null"):
        parse_chat({"messages": None})
    with pytest.raises(BadRequest, match="got something else"):
        parse_chat({"messages": ()})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        ([1, 2], (array("I", [1, 2]),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], (array("I", [1]), array("I", [2, 3]))),
        ([1.0, 2], (array("I", [1, 2]),)),
        ([[1.0]], (array("I", [1]),)),
        ([], ()),
        ("", ("",)),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    """The four shapes of a prompt become a tuple of texts and arrays."""
    request = parse_completion({"prompt": prompt, "model": "m", "max_tokens": 1, "stream": True})

    assert request.prompts == prompts
    assert request.stream
    assert request.add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([2**32], "prompt[0]"),
        ([1.5], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        ([[1], [2, None]], "prompt[1][1]"),
        ([{}], "prompt[0]"),
    ],
)
def test_prompt_errors_name_the_place(prompt: Any, param: str) -> None:
    """A wrong prompt is refused with the place in it."""
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": prompt})

    assert caught.value.param == param


def test_embeddings_are_the_engines() -> None:
    """Prompt embeddings stand in for a prompt and are for the engine alone."""
    request = parse_completion({"prompt_embeds": "AAAA"})

    assert request.prompts == ()
    assert request.engine_only == "prompt_embeds"


def test_tokenize_body() -> None:
    """What the chat route does before rendering is done before `/tokenize` is asked."""
    talk = [
        {"role": "user", "content": None},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "reasoning_content": "no", "reasoning": "yes"},
        {"role": "assistant", "reasoning_content": None},
    ]

    sent = tokenize_body(
        {
            "model": "m",
            "messages": talk,
            "tools": None,
            "temperature": 0.5,
            "reasoning_effort": "low",
            "documents": [{"title": "t"}],
            "chat_template_kwargs": {"custom": 1},
        }
    )

    assert sent == {
        "model": "m",
        "messages": [
            talk[0],
            {"role": "assistant", "reasoning": "hm"},
            {"role": "assistant", "reasoning": "yes"},
            {"role": "assistant"},
        ],
        "chat_template_kwargs": {
            "custom": 1,
            "enable_thinking": True,
            "reasoning_effort": "low",
            "documents": [{"title": "t"}],
        },
    }
    assert "reasoning_content" in talk[1]


@pytest.mark.parametrize("effort", [None, "none", "high"])
def test_tokenize_body_respects_the_client(effort: str | None) -> None:
    """A client that set `enable_thinking` itself is not overruled."""
    given = {"enable_thinking": True}
    body = {"messages": HELLO, "reasoning_effort": effort, "chat_template_kwargs": given}

    sent = tokenize_body(body)

    assert sent["chat_template_kwargs"]["enable_thinking"] is True
    assert given == {"enable_thinking": True}
