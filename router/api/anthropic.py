"""Anthropic's Messages API as vLLM serves it: a chat request in other words.

vLLM converts a body to a chat request and goes on as if that had been sent. `parse_messages` does
the same, so that what is known of chats (template, tokens, blocks) holds for messages. Errors in a
body are the engine's to find: what it would refuse, or only it can convert, has `engine_only` set.
Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (to_chat_completion_request,
_handle_thinking, _handle_output_config, _build_anthropic_usage).
"""

from __future__ import annotations

from typing import Any, Final, get_type_hints

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace

from router.api import openai
from router.api.anthropic_blocks import Chat, add_message, add_system
from router.api.anthropic_tools import chat_tool_choice, chat_tools, tool_changes
from router.api.anthropic_types import Block, Message, Options, ThinkingDisabled, Unknown
from router.api.openai import ChatRequest, Json
from router.api.usage import NOT_JSON, PromptDetails, Usage, usage_of_stream

_OPTIONS: Final[dict[str, Any]] = get_type_hints(Options)
_COUNTED: Final = (
    "model messages output_config system thinking tool_choice tools chat_template_kwargs"
).split()


def parse_messages(body: Json) -> ChatRequest:
    """View a decoded body as the chat request that the engine makes of it.

    Raises:
        BadRequest: a field that routing needs is of the wrong type.
    """
    view = openai.view_fields(body)
    chats: list[Chat] = []
    try:
        return _converted(body, view, chats)
    except Unknown as exc:
        reason = str(exc)
    except (RecursionError, ValueError):
        reason = "depth"
    return replace(view, messages=chats, engine_only=reason)  # its beginning, for affinity


def parse_count(body: Json) -> ChatRequest:
    """View a body of `/v1/messages/count_tokens`, which knows fewer fields.

    Raises:
        BadRequest: as `parse_messages`.
    """
    return parse_messages({field: body[field] for field in _COUNTED if field in body})


def _converted(body: Json, view: ChatRequest, chats: list[Chat]) -> ChatRequest:
    """Convert a body; `chats` are the messages as far as it has come.

    Raises:
        Unknown: the engine refuses it, or may read it in another way.
    """
    options = _options(body)
    add_system(options.system, chats)
    changes: list[Block] = []
    for message in _list(body, "messages"):
        read = _read(message, Message, "block")
        if read.role == "system":
            changes += tool_changes(read.content)
        add_message(read, chats)
    tools = chat_tools(options.tools, changes)
    is_disabled = isinstance(options.thinking, ThinkingDisabled)
    effort = options.output_config.effort if options.output_config is not None else None
    return replace(
        view,
        messages=chats,
        tools=tools,
        tool_choice=chat_tool_choice(options.tool_choice, tools),
        reasoning_effort="none" if is_disabled else effort,
        is_thinking_disabled=is_disabled,
        has_inline_system=any(chat["role"] == "system" for chat in chats[1:]),
        chat_template_kwargs=options.chat_template_kwargs,
    )


def _options(body: Json) -> Options:
    """Read all but the messages, field by field.

    Raises:
        Unknown: names the field that does not fit.
    """
    fields = {name: _read(body.get(name), kind, name) for name, kind in _OPTIONS.items()}
    return Options(**fields)


def _list(body: Json, name: str) -> list[Any]:
    value = body.get(name)
    if type(value) is not list:
        raise Unknown(name)
    return value


def _read(value: object, kind: Any, name: str) -> Any:
    if value is None and kind is not Message:
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise Unknown(name) from exc


def counted_body(num_tokens: int) -> bytes:
    """Write the answer of `/v1/messages/count_tokens`."""
    context = {"original_input_tokens": num_tokens}
    return orjson.dumps({"input_tokens": num_tokens, "context_management": context})


class _Counts(Struct):
    input_tokens: int
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _MessageWithUsage(Struct):
    usage: _Counts | None = None


_decoder = msgspec.json.Decoder(_MessageWithUsage)


def usage_of_message(body: bytes) -> Usage | None:
    """Read the usage of a whole answer, or of a stream's `message_delta`; None: there is none.

    `input_tokens` are those that came from no cache and went into none. `message_start` has its
    usage elsewhere, and does not know yet what was cached.
    """
    try:
        counts = _decoder.decode(body).usage
    except NOT_JSON:
        return None
    if counts is None:
        return None
    num_cached = counts.cache_read_input_tokens
    num_created = counts.cache_creation_input_tokens
    return Usage(
        prompt_tokens=counts.input_tokens + (num_cached or 0) + (num_created or 0),
        completion_tokens=counts.output_tokens,
        prompt_tokens_details=PromptDetails(num_cached) if num_cached is not None else None,
    )


def usage_of_messages(tail: bytes) -> Usage | None:
    """Read the usage from the end of an event stream."""
    return usage_of_stream(tail, usage_of_message)
