"""Digests of what a chat's prompt is made of: tools, system prompt, messages.

They show where a prompt differs from the one before, and keep no text. What engines leave out of
prompts is left out here: `cache_control` marks, which move from turn to turn, and Claude Code's
billing header, which is another one in each request.

A digest of a request's content, by which a repeated request is recognised.

SDKs send the same bytes again, except for a form's boundary. Agents write a new body: with another
order of keys, another billing header, or without streaming. So JSON is parsed, and fields that do
not decide what an engine computes are left out. A body that would take long to parse is digested as
it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import orjson
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.api.anthropic import BILLING_HEADER
from router.api.body import AT_ONCE_MS, Malformed, boundary_of, costs_ms

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
        item = items[index]  # no call for each of a long chat's messages
        if type(item) is dict and item.get("role") in SYSTEM_ROLES:
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


LARGE_BYTES: Final = 1 << 20
"""A larger body is not read as JSON, and is better hashed in another thread: 1 ms per MB."""

_SIZE: Final = 12
_LEFT_OUT: Final = frozenset(
    {
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "metadata",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "session_id",
        "stream",
        "stream_options",
        "user",
    }
)
"""Fields that say who asks, or how the answer is sent."""


def body_digest(body: bytes, content_type: str, *, path: str, owner: str) -> bytes:
    """Digest a request.

    Args:
        owner: Whose it is: another caller's request of the same body has another digest.
    """
    digest = blake2b(f"{owner}\0{path}\0".encode(errors="surrogatepass"), digest_size=_SIZE)
    boundary = _boundary(content_type)
    if boundary is not None:
        view, start = memoryview(body), 0
        while (found := body.find(boundary, start)) >= 0:
            digest.update(view[start:found])
            start = found + len(boundary)
        digest.update(view[start:])
    else:
        digest.update(_canonical(body) or body)
    return digest.digest()


def _boundary(content_type: str) -> bytes | None:
    """Find what separates the parts of a form; None: it is no form, or an unusual one."""
    try:
        return boundary_of(content_type)
    except Malformed:
        return None


def _canonical(body: bytes) -> bytes | None:
    """Write a JSON object as all that mean the same are written; None: it is none, or large."""
    if len(body) > LARGE_BYTES or costs_ms(body) > AT_ONCE_MS:
        return None
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(read, dict):
        return None
    fields = {name: value for name, value in read.items() if name not in _LEFT_OUT}
    system = fields.get("system")
    if isinstance(system, list):
        fields["system"] = [block for block in system if not _is_billing(block)]
    try:
        return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    except (TypeError, orjson.JSONEncodeError):  # an integer beyond 64 bits, a lone surrogate
        return None


def _is_billing(block: object) -> bool:
    text = block.get("text") if isinstance(block, Mapping) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)
