"""Rebuild messages and tools as the engine gives them to the chat template, to the key.

The engine first decodes a request into typed models. They drop unknown fields, and order the known
ones. Then it rebuilds every message. Here both steps are one, for the shapes whose result is
certain. Every other shape is left to the engine (`NeedsEngine`), which refuses most of them.

An agent's history repeats the arguments of every tool call as a JSON text. The engine parses them,
and most templates print them again. `JsonMemo` remembers both by their text, within a budget of
bytes. Requests may share values, because templates cannot change them: the sandbox is immutable.

Source: vLLM 0.32.0, renderers/chat_utils.py (_parse_chat_message_content,
_postprocess_messages), renderers/hf.py (_convert_developer_to_system,
_consolidate_system_messages), entrypoints/openai/chat_completion/protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

from router.api.anthropic import BILLING_HEADER
from router.api.openai import Json
from router.base.bounded import BoundedBytes
from router.tokens.media import MEDIA_PARTS, read_item
from router.tokens.needs_engine import NeedsEngine
from router.tokens.template_probes import ContentFormat

Tojson = Callable[..., str]

_MAX_ARGUMENTS = 256 * 1024
"""Characters of one call's arguments: to parse them blocks the interpreter for up to 8 ms."""

_Key = str | bytes | tuple[str, str | bytes]


class _Entry(NamedTuple):
    value: Any
    printable: Sequence[Any]  # the objects in it whose JSON is remembered
    size_bytes: int


class JsonMemo:
    """Values by the text that they were parsed from, and the JSON of these values by identity.

    owner: Whose values these are; see `of`.
    """

    __slots__ = ("_entries", "_printed", "owner")

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self.owner = ""
        self._entries: BoundedBytes[_Key, _Entry] = BoundedBytes(max_bytes)
        self._printed: dict[int, str | None] = {}  # by id(); None: not printed yet

    @property
    def size_bytes(self) -> int:
        """Return what is taken of the budget (estimated)."""
        return self._entries.size_bytes

    def arguments(self, text: str) -> dict[str, Any]:
        """Parse a tool call's arguments as the engine does: {} unless they are an object.

        Raises:
            NeedsEngine: JSON that the engine cannot parse: too deep, or with a too long number.
        """
        known: dict[str, Any] | None = self.get(text)
        if known is not None:
            return known
        if len(text) > _MAX_ARGUMENTS:
            raise NeedsEngine("arguments", "too long")
        try:
            value = json.loads(text) if text else {}
        except json.JSONDecodeError:
            value = {}
        except (ValueError, RecursionError) as exc:
            raise NeedsEngine("arguments", type(exc).__name__) from exc
        if not isinstance(value, dict):
            value = {}
        self.put(text, value, (value,))
        return value

    def get(self, key: _Key) -> Any:
        """Return the value of `key`; None if it is unknown or was evicted."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: _Key, value: Any, printable: Sequence[Any]) -> None:
        """Remember `value` under `key`, and evict the oldest entries above the budget."""
        size_bytes = _size(_text(key))
        if key in self._entries or size_bytes > self._entries.most:
            return
        for item in printable:
            self._printed[id(item)] = None
        for oldest in self._entries.put(key, _Entry(value, printable, size_bytes)):
            for item in oldest.printable:
                del self._printed[id(item)]

    def of(self, owner: str) -> JsonMemo:
        """Return an owner's part: of the same budget, but no other owner finds its values."""
        return _Owned(self, owner) if owner else self

    def wrap(self, tojson: Tojson) -> Tojson:
        """Make the filter `tojson` remember the JSON of known values, printed without options."""
        printed = self._printed

        def remembering(value: Any, *args: Any, **kwargs: Any) -> str:
            if args or kwargs or id(value) not in printed:
                return tojson(value, *args, **kwargs)
            text = printed[id(value)]
            if text is None:
                text = printed[id(value)] = tojson(value)
            return text

        return remembering


class _Owned(JsonMemo):
    """One owner's part of a memo."""

    __slots__ = ("_memo",)

    def __init__(self, memo: JsonMemo, owner: str) -> None:
        self._memo = memo
        self.owner = owner

    def get(self, key: _Key) -> Any:
        return self._memo.get((self.owner, _text(key)))

    def put(self, key: _Key, value: Any, printable: Sequence[Any]) -> None:
        self._memo.put((self.owner, _text(key)), value, printable)


def _size(text: str | bytes) -> int:
    """Estimate the memory of a text, the objects parsed from it, and their JSON.

    An empty list or object takes 64 bytes, an object's first key 120 more, a number or text 30.
    """
    if isinstance(text, str):
        text = text.encode(errors="surrogatepass")
    num_objects = text.count(b"{") + text.count(b"[")
    num_bytes = 64 * num_objects + 120 * text.count(b":") + 40 * text.count(b",")
    return 512 + 4 * len(text) + num_bytes


def _text(key: _Key) -> str | bytes:
    return key[1] if isinstance(key, tuple) else key


Conversation = list[dict[str, Any]]

_USUAL_KEYS = {
    "system": frozenset({"role", "content"}),
    "developer": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning", "reasoning_content"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
_PLAIN_ROLES = frozenset({"user", "assistant"})
_CUSTOM_ROLE_KEYS = frozenset({"role", "content", "name"})
# Keys that make the engine read a message as something else, unless they are null.
_HAZARDOUS_KEYS = ("audio", "function_call", "tools")
# Keys of openai_harmony's message model, which competes with the others for the message.
_HARMONY_KEYS = frozenset({"author", "channel", "recipient", "content_type"})
# Fields of any content part that the engine's models know: dropped, while extra ones are kept.
_PART_FIELDS = frozenset(
    "audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name "
    "prompt_cache_breakpoint refusal text thinking type uuid video_embeds video_url".split()
)


def build_conversation(
    messages: Sequence[Json],
    content_format: ContentFormat,
    memo: JsonMemo,
    *,
    name_first: bool = False,
    shows_media: bool = False,
) -> Conversation:
    """Rebuild the messages for the template.

    Args:
        name_first: Put a call's name before its arguments, unlike the chat route's model.
        shows_media: Leave images to the template, if it takes parts.

    Raises:
        NeedsEngine: it is not certain how the engine reads a message.
    """
    as_parts = content_format == "openai"
    shows_media = shows_media and as_parts
    conversation: Conversation = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if len(message) == 2 and type(content) is str and role in _PLAIN_ROLES:  # as most are
            plain = [{"type": "text", "text": content}] if as_parts else content
            conversation.append({"role": role, "content": plain})
        else:
            conversation.append(_message(message, as_parts, memo, shows_media))
    if name_first:
        for message in conversation:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                call["function"] = {"name": function.pop("name"), **function}
    return conversation


def _message(message: Json, as_parts: bool, memo: JsonMemo, shows_media: bool) -> dict[str, Any]:
    role = message["role"]
    check_message(message)
    content = message.get("content")
    if type(content) is str and role != "system":
        if as_parts and role != "tool":
            content = [{"type": "text", "text": content}]
    else:
        content = _content(message, role, as_parts, shows_media)
    rebuilt: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if "tool_calls" in message:
            calls = _tool_calls(message, memo)
            if calls:
                rebuilt["tool_calls"] = calls
        reasoning = reasoning_of(message)
        if reasoning is not None:
            rebuilt["reasoning"] = rebuilt["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        rebuilt["tool_call_id"] = tool_call_id = message["tool_call_id"]
        if type(tool_call_id) is not str:
            _check_unusual(message, is_known_role=True)
    if "name" in message:
        rebuilt["name"] = message["name"]
    if "task" in message:
        rebuilt["task"] = message["task"]
    if role == "developer":
        rebuilt["tools"] = None
    return rebuilt


def check_message(message: Json) -> None:
    """Check a message's keys and role, but not its parts and calls.

    Raises:
        NeedsEngine: it is not certain how the engine reads the message.
    """
    role = message["role"]
    usual_keys = _USUAL_KEYS.get(role)
    if usual_keys is None or not message.keys() <= usual_keys:
        _check_unusual(message, is_known_role=usual_keys is not None)
    if "content" in message and message["content"] is None and role != "assistant":
        raise NeedsEngine("message", "content is null")


def text_parts(message: Json) -> list[dict[str, Any]]:
    """List the text parts of a message whose content is a list.

    Raises:
        NeedsEngine: there are others.
    """
    return [_part(part) for part in message["content"]]


def _check_unusual(message: Json, *, is_known_role: bool) -> None:
    """Accept keys that the engine ignores or only copies.

    Raises:
        NeedsEngine: a key that may change how the engine reads the message.
    """
    if not is_known_role and not message.keys() <= _CUSTOM_ROLE_KEYS:
        raise NeedsEngine("message", "role")
    if not message.keys().isdisjoint(_HARMONY_KEYS):
        raise NeedsEngine("message", "harmony")
    for key in ("name", "task"):
        if key in message and not isinstance(message[key], str):
            raise NeedsEngine("message", key)
    for key in _HAZARDOUS_KEYS:
        if message.get(key) is not None:
            raise NeedsEngine("message", key)
    for key in ("refusal", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise NeedsEngine("message", key)
    if message["role"] != "assistant":
        reasoning_of(message)
        if message.get("tool_calls") not in (None, []):
            raise NeedsEngine("message", "tool_calls")


def _content(
    message: Json, role: str, as_parts: bool, shows_media: bool
) -> str | list[dict[str, Any]]:
    """Rebuild content that is not a plain string."""
    content = message.get("content")
    if content is None:
        parts: list[Any] = []
    elif type(content) is str:
        parts = [{"type": "text", "text": content}]
    else:
        parts = content
    if shows_media and role in ("user", "tool"):
        checked = [_part_or_media(part) for part in parts]
        if any(part["type"] != "text" for part in checked):
            return checked
    else:
        checked = [_part(part) for part in parts]
    if role == "system":
        checked = [part for part in map(_without_billing_header, checked) if part is not None]
    if not as_parts:
        return "\n".join([part["text"] for part in checked if part["text"]])
    if role == "tool":  # few templates take parts here; the engine then keeps the empty ones
        return "\n".join([part["text"] for part in checked])
    return checked


def _part_or_media(part: Any) -> dict[str, Any]:
    """Rebuild a text part or an item: its type, then the fields that the engine does not know."""
    name = part.get("type") if type(part) is dict else None
    if type(name) is not str or name not in MEDIA_PARTS:
        return _part(part)
    kind = read_item(part).kind
    extras = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    if len(extras) + 2 + ("uuid" in part) != len(part):
        raise NeedsEngine("multimodal", "content part")
    return {"type": kind, **extras}


def _part(part: Any) -> dict[str, Any]:
    """Rebuild a text part: its type and text, then the fields that the engine does not know."""
    if type(part) is not dict:
        raise NeedsEngine("message", "content part")
    if part.get("type") != "text":
        kind = part.get("type")
        raise NeedsEngine("multimodal" if isinstance(kind, str) else "message", "content part")
    text = part.get("text")
    if type(text) is not str:
        raise NeedsEngine("message", "content part")
    if len(part) == 2:
        return part
    extras = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    if len(extras) + 2 != len(part):
        raise NeedsEngine("message", "content part")
    return {"type": "text", "text": text, **extras}


def _without_billing_header(part: dict[str, Any]) -> dict[str, Any] | None:
    """Drop the first line of Claude Code's prompt, which changes with every request."""
    text: str = part["text"]
    if not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _tool_calls(message: Json, memo: JsonMemo) -> list[dict[str, Any]] | None:
    calls = message["tool_calls"]
    if calls is None:
        if "content" in message and message["content"] is None:
            raise NeedsEngine("tool_calls", "null beside null content")  # no model accepts both
        return None
    return [_tool_call(call, memo) for call in check_calls(calls)]


def check_calls(calls: Any) -> list[Json]:
    """Return a message's calls if they are all calls of functions.

    Raises:
        NeedsEngine: it is not certain how the engine reads one.
    """
    if type(calls) is not list:
        raise NeedsEngine("tool_calls", "not a list")
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        if (
            type(function) is not dict
            or call.get("type") != "function"
            or type(call.get("id")) is not str
            or type(function.get("name")) is not str
            or type(function.get("arguments")) is not str
        ):
            raise NeedsEngine("tool_calls", "id, type or function")
    return calls


def _tool_call(call: Json, memo: JsonMemo) -> dict[str, Any]:
    """Rebuild a call: known fields in the models' order, then the others in the request's order."""
    function = call["function"]
    rebuilt = {"arguments": memo.arguments(function["arguments"]), "name": function["name"]}
    if len(function) > 2:
        rebuilt.update((key, value) for key, value in function.items() if key not in rebuilt)
    called = {"id": call["id"], "function": rebuilt, "type": "function"}
    if len(call) > 3:
        called.update((key, value) for key, value in call.items() if key not in called)
    return called


def reasoning_of(message: Json) -> str | None:
    """Return a message's reasoning.

    Raises:
        NeedsEngine: it is no text.
    """
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None and type(reasoning) is not str:
        raise NeedsEngine("message", "reasoning")
    return reasoning


def without_developer(conversation: Conversation) -> Conversation:
    """Join developer and system messages into one system message at the front.

    For templates that do not know the role. Without a developer message, nothing changes.
    """
    for message in conversation:
        if message["role"] == "developer":
            break
    else:
        return conversation
    converted = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    positions = [i for i, message in enumerate(converted) if message["role"] == "system"]
    texts = [_joined(converted[i]["content"]) for i in positions]
    if positions[-1] == 0:
        return converted
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content])


def build_tools(tools: Sequence[Json] | None, memo: JsonMemo) -> list[dict[str, Any]] | None:
    """Rebuild the tools: known fields only, in the models' order, null if absent.

    Raises:
        NeedsEngine: a tool that the engine refuses or might read differently.
    """
    if tools is None:
        return None
    try:
        key = orjson.dumps(tools)  # unlike ==, this tells orders and types of numbers apart
    except (TypeError, ValueError) as exc:
        raise NeedsEngine("tools", type(exc).__name__) from exc
    known: list[dict[str, Any]] | None = memo.get(key)
    if known is not None:
        return known
    check_numbers(tools)
    rebuilt = [_tool(tool) for tool in tools]
    memo.put(key, rebuilt, rebuilt)
    return rebuilt


def _tool(tool: Json) -> dict[str, Any]:
    function = tool["function"]
    deferred = tool.get("defer_loading")
    if tool.get("type", "function") != "function" or not isinstance(deferred, bool | None):
        raise NeedsEngine("tools", "type or defer_loading")
    rebuilt = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if not isinstance(rebuilt["description"], str | None) or not isinstance(
        rebuilt["parameters"], dict | None
    ):
        raise NeedsEngine("tools", "description or parameters")
    for key, default in (("strict", None), ("defer_loading", deferred)):
        value = function.get(key)
        if value is None:
            value = default
        if not isinstance(value, bool | None):
            raise NeedsEngine("tools", key)
        if value is not None:
            rebuilt[key] = value
    whole: dict[str, Any] = {"type": "function", "function": rebuilt}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def check_numbers(value: Any) -> None:
    """Refuse numbers that our JSON decoder may have read differently from the engine's.

    It reads an integer beyond 64 bits as a float; the engine's keeps it whole.

    Raises:
        NeedsEngine: such a number is in `value`.
    """
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        if isinstance(value, float) and abs(value) >= 2**63:
            raise NeedsEngine("number", "beyond 64 bits")
        return
    for item in value:
        check_numbers(item)
