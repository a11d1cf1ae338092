"""Anthropic's Messages API as vLLM serves it: a chat request in other words.

vLLM converts a body to a chat request and goes on as if that had been sent. `parse_messages` does
the same, so that what is known of chats (template, tokens, blocks) holds for messages. Errors in a
body are the engine's to find: what it would refuse, or only it can convert, has `engine_only` set.
Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (to_chat_completion_request,
_handle_thinking, _handle_output_config, _build_anthropic_usage).

Anthropic's messages and content blocks as the chat messages that vLLM makes of them.

Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (_convert_system_message, _convert_messages,
_convert_block, _convert_user_tool_result).

    system         text blocks joined with nothing between; Claude Code's billing header is dropped
    role `system`  stays where it is; some templates want it merged into the first message, which is
                   decided where the template is known (router.tokens.template_probes)
    user           one text: a string; else parts; `tool_result`s: messages before it, their own
                   images in a user message behind each
    assistant      thinking joined: `reasoning`; `tool_use`: calls; other known blocks: nothing

Anthropic's tools as the chat tools that vLLM makes of them.

Blocks of system messages may add tools and remove them: a template sees one list, that of the end
of the conversation. Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (_resolve_tools,
_convert_tools, _convert_tool_choice).

What a body of `/v1/messages` may hold, as far as the prompt depends on it.

Typed as vLLM's models are, without its leniency (a number for a text, "yes" for true): what does
not fit is the engine's to take or to refuse. Other fields are ignored, there and here. Source:
vLLM 0.32.0, entrypoints/anthropic/protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
import orjson
from msgspec import Meta, Struct
from msgspec.structs import replace

from router.api import openai
from router.api.answers import NOT_JSON, PromptDetails, Usage, usage_of_stream
from router.api.openai import ChatRequest, Json

TOOL_CHANGES: Final = ("tool_addition", "tool_removal")
"""Types of blocks that only system messages may have."""


class Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(Struct, tag_field="type", tag="tool_reference"):
    name: str


class ToolDefinition(Struct, tag_field="type", tag="tool_definition"):
    definition: Tool


class Block(Struct):
    """Any content block: which fields mean something depends on its type."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: ToolReference | ToolDefinition | None = None


class Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_Display = Literal["summarized", "omitted", "updates"]


class ThinkingEnabled(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024)]
    display: _Display | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled"):
    pass


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive"):
    display: _Display | None = None


class OutputFormat(Struct):
    schema: dict[str, Any] | None = None
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Options(Struct):
    """All that the prompt depends on but the messages, which are read one by one."""

    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Unknown(Exception):
    """What the engine makes of a body is not known here; the message is a word for it."""


Chat = dict[str, Any]
"""A message of a chat."""

BILLING_HEADER: Final = "x-anthropic-billing-header"
_LARGE: Final = 2.0**63


def add_system(system: str | Sequence[Block] | None, chats: list[Chat]) -> None:
    """Convert the `system` field and add it, unless it says nothing.

    Raises:
        Unknown: the engine refuses it.
    """
    if system and not isinstance(system, str):
        _refuse_tool_changes(system)
        system = _system_text(system)
    if system:
        chats.append({"role": "system", "content": system})


def add_message(message: Message, chats: list[Chat]) -> None:
    """Convert a message and add what it becomes.

    Raises:
        Unknown: the engine refuses it, or may read it in another way.
    """
    role, content = message.role, message.content
    if role == "system":
        if not isinstance(content, str):
            content = _system_text(content)
        elif content.startswith(BILLING_HEADER):
            return
        if content:
            chats.append({"role": "system", "content": content})
    elif isinstance(content, str):
        chats.append({"role": role, "content": content})
    else:
        _refuse_tool_changes(content)
        _add_blocks(role, content, chats)


def _refuse_tool_changes(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.type in TOOL_CHANGES:
            raise Unknown("block")


def _system_text(blocks: Sequence[Block]) -> str:
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return "".join([text for text in texts if not text.startswith(BILLING_HEADER)])


def _add_blocks(role: str, blocks: Sequence[Block], chats: list[Chat]) -> None:
    """Convert one message's blocks."""
    parts: list[Chat] = []
    calls: list[Chat] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.type
        if kind == "text":
            if block.text:
                parts.append({"type": "text", "text": block.text})
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            if role == "user":
                chats.extend(_tool_result(block))
            else:
                check_numbers(block.content)
                parts.append({"type": "text", "text": f"Tool result: {block.content or ''}"})
        elif kind == "thinking":
            if block.thinking is not None:
                reasoning.append(block.thinking)
        elif kind == "image" and block.source:
            parts.append(_image(block.source))
    chat: Chat = {"role": role}
    if reasoning:
        chat["reasoning"] = "".join(reasoning)
    if calls:
        chat["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        chat["content"] = parts[0]["text"]
    elif parts:
        chat["content"] = parts
    if role != "user" or parts:
        chats.append(chat)


def _call(block: Block) -> Chat:
    """Convert a `tool_use`; its input becomes JSON, as the chat API has it.

    Raises:
        Unknown: the engine makes up an id, or our JSON decoder may have read a number differently.
    """
    if not block.id:
        raise Unknown("tool_use.id")
    function = {"name": block.name or "", "arguments": arguments_of(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def arguments_of(given: dict[str, Any]) -> str:
    """Write a call's input as `json.dumps` does, in a tenth of the time where it is plain.

    Raises:
        Unknown: as `check_numbers`.
    """
    members = []
    for key, value in given.items():
        if type(value) is not str:
            break
        member = orjson.dumps(key) + b": " + orjson.dumps(value)
        if not member.isascii() or b"\x7f" in member:  # the same but for these, which it escapes
            break
        members.append(member)
    else:
        return (b"{" + b", ".join(members) + b"}").decode()
    arguments = json.dumps(given)
    if "e+" in arguments:  # in every float from 1e16 on
        check_numbers(given)
    return arguments


def _tool_result(block: Block) -> Iterator[Chat]:
    """Convert a `tool_result` of a user: its texts, then its images, then what it refers to."""
    call_id = block.tool_use_id or ""
    content = block.content
    if content is None or isinstance(content, str):
        yield {"role": "tool", "tool_call_id": call_id, "content": content or ""}
        return
    texts: list[Any] = []
    images: list[Chat] = []
    references: list[Chat] = []
    for item in content:
        kind = item.get("type")
        if kind == "text":
            texts.append(item.get("text", ""))
        elif kind == "image":
            source = item.get("source", {})
            if type(source) is not dict:
                raise Unknown("block")
            image = _image(source)
            if image["image_url"]["url"]:
                images.append(image)
        elif kind == "tool_reference":
            name = item.get("tool_name") or item.get("name")
            if name:
                references.append({"type": "tool_reference", "name": name})
    if not all(type(text) is str for text in texts):
        raise Unknown("block")
    yield {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references:
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _image(source: dict[str, Any]) -> Chat:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def check_numbers(value: object) -> None:
    """Refuse numbers that our JSON decoder may have read differently from the engine's.

    It reads an integer beyond 64 bits as a float.

    Raises:
        Unknown: such a number is in `value`.
        RecursionError: it is nested too deep.
    """
    if type(value) is dict:
        for item in value.values():
            check_numbers(item)
    elif type(value) is list:
        for item in value:
            check_numbers(item)
    elif type(value) is float and abs(value) >= _LARGE:
        raise Unknown("number")


_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def tool_changes(content: str | Sequence[Block]) -> list[Block]:
    """Return the blocks of a system message that add a tool or remove one."""
    if isinstance(content, str):
        return []
    return [block for block in content if block.type in TOOL_CHANGES]


def chat_tools(declared: Sequence[Tool] | None, changes: Sequence[Block]) -> list[Json] | None:
    """Convert the tools in effect at the end of the conversation; None: there are none.

    Raises:
        Unknown: a change that the engine refuses.
    """
    if changes:
        declared = _changed(declared or (), changes)
    return [_chat_tool(tool) for tool in declared] if declared is not None else None


def _changed(declared: Sequence[Tool], changes: Sequence[Block]) -> list[Tool]:
    """Make the changes, one after another; a tool keeps its first place."""
    tools = {tool.name: tool for tool in declared}
    removed: set[str] = set()
    for block in changes:
        change, is_removal = block.tool, block.type == "tool_removal"
        if isinstance(change, ToolDefinition):
            name = change.definition.name
            tools[name] = change.definition
        else:
            name = change.name if change is not None else ""
            if name not in tools or change is None:
                raise Unknown("tools")
            if not is_removal:
                tools[name] = replace(tools[name], defer_loading=None)
        if not is_removal:
            removed.discard(name)
        elif isinstance(change, ToolDefinition):
            raise Unknown("tools")
        else:
            removed.add(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _chat_tool(tool: Tool) -> dict[str, Any]:
    schema = tool.input_schema
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": function}


def chat_tool_choice(choice: ToolChoice | None, tools: Sequence[Json] | None) -> str | Json | None:
    """Convert the choice; with tools it is `auto` unless said otherwise.

    Raises:
        Unknown: one tool is to be called, and is none of those.
    """
    if choice is None:
        return "auto" if tools is not None else None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not any(tool["function"]["name"] == choice.name for tool in tools or ()):
        raise Unknown("tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


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
