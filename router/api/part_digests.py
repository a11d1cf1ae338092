"""Digests of what a chat's prompt is made of: tools, system prompt, messages.

They show where a prompt differs from the one before, and keep no text. What engines leave out of
prompts is left out here: `cache_control` marks, which move from turn to turn, and Claude Code's
billing header, which is another one in each request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.api.anthropic_blocks import BILLING_HEADER

FIELDS: Final = {
    "/v1/chat/completions": ("messages", "system"),
    "/v1/messages": ("messages", "system"),
    "/v1/messages/count_tokens": ("messages", "system"),
    "/v1/responses": ("input", "instructions"),
}
"""Route -> the fields with the conversation and with what stands before it."""

SYSTEM_ROLES: Final = ("system", "developer")

MAX_MESSAGES: Final = 4_096
"""Messages, or tools, of a request that is digested: 10 ms at most."""

_ANSWERS: Final = ("function_call", "reasoning")  # types of items of the Responses API
_MARK: Final = "cache_control"
_UNREADABLE: Final = 1


class PartDigests(Struct, frozen=True, gc=False):
    """The digests of one request; 0: it has no such part.

    tool_set: Of the tools, whatever their order.
    messages: Of the messages behind the system's.
    num_system: Messages of the system in front of them.
    last_system: Index of the last message in `messages` that is the system's; -1: there is none.
    has_answers: It goes on a conversation that was answered before.
    """

    tools: int
    tool_set: int
    system: int
    messages: array[int]
    num_system: int = 0
    last_system: int = -1
    has_answers: bool = False


def items_of(path: str, body: Mapping[str, Any]) -> list[Any] | None:
    """Return a conversation's messages, or items; None: it is no chat."""
    if path not in FIELDS:
        return None
    items = body.get(FIELDS[path][0])
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return items if type(items) is list else None


def parts_of(path: str, body: Mapping[str, Any], known: Sequence[int] = ()) -> PartDigests | None:
    """Digest the parts of a request; None: it is no chat, or too long.

    Args:
        path: Of its route.
        body: As it was parsed.
        known: Digests of the leading messages, if they are known already.
    """
    items, tools = items_of(path, body), body.get("tools")
    if items is None or len(items) > MAX_MESSAGES:
        return None
    if type(tools) is list and len(tools) > MAX_MESSAGES:
        return None
    digests = [*known, *map(digest_message, items[len(known) :])]
    num_system = _num_system(items)
    system = [digests[i] for i in range(num_system)]
    if text := body.get(FIELDS[path][1]):
        system.append(_digest(_system(text)))
    each = [_digest(_unmarked(tool)) for tool in tools] if type(tools) is list else []
    return PartDigests(
        tools=_joined(each),
        tool_set=_joined(sorted(each)),
        system=_joined(system),
        messages=array("Q", digests[num_system:]),
        num_system=num_system,
        last_system=_last_system(items[num_system:]),
        has_answers=any(map(_is_answer, items[num_system : num_system + 8])),
    )


def digest_message(message: object) -> int:
    """Digest a message as engines read it."""
    if type(message) is dict:
        content = message.get("content")
        if type(content) is list and any(_MARK in part for part in content if type(part) is dict):
            message = {**message, "content": [_unmarked(part) for part in content]}
        if message.get("role") in SYSTEM_ROLES:
            message = {**message, "content": _system(content)}
    return _digest(message)


def _num_system(items: Sequence[object]) -> int:
    num_system = 0
    for item in items:
        if not _is_system(item):
            break
        num_system += 1
    return num_system


def _last_system(items: Sequence[object]) -> int:
    for index in range(len(items) - 1, -1, -1):
        if _is_system(items[index]):
            return index
    return -1


def _is_system(item: object) -> bool:
    return type(item) is dict and item.get("role") in SYSTEM_ROLES


def _is_answer(item: object) -> bool:
    return type(item) is dict and (item.get("role") == "assistant" or item.get("type") in _ANSWERS)


def _system(content: object) -> object:
    """Drop the billing header, and marks."""
    if type(content) is str and content.startswith(BILLING_HEADER):
        return content.partition("\n")[2]
    if type(content) is not list:
        return content
    return [
        _unmarked(part)
        for part in content
        if not (type(part) is dict and str(part.get("text", "")).startswith(BILLING_HEADER))
    ]


def _unmarked(part: object) -> object:
    if type(part) is dict and _MARK in part:
        return {key: value for key, value in part.items() if key != _MARK}
    return part


def _digest(value: object) -> int:
    try:
        return xxh3_64_intdigest(orjson.dumps(value))
    except (TypeError, ValueError):  # orjson reads deeper values than it writes
        return _UNREADABLE


def _joined(digests: Sequence[int]) -> int:
    return xxh3_64_intdigest(array("Q", digests).tobytes()) if digests else 0
