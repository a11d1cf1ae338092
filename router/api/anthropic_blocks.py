"""Anthropic's messages and content blocks as the chat messages that vLLM makes of them.

Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (_convert_system_message, _convert_messages,
_convert_block, _convert_user_tool_result).

    system         text blocks joined with nothing between; Claude Code's billing header is dropped
    role `system`  stays where it is; some templates want it merged into the first message, which is
                   decided where the template is known (router.tokens.template_probes)
    user           one text: a string; else parts; `tool_result`s: messages before it, their own
                   images in a user message behind each
    assistant      thinking joined: `reasoning`; `tool_use`: calls; other known blocks: nothing
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from router.api.anthropic_types import TOOL_CHANGES, Block, Message, Unknown

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
