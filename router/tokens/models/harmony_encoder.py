"""Make token ids of gpt-oss prompts in marked text (see `harmony`), by OpenAI's harmony library.

The library (the extra `harmony`; it brings its vocabulary) encodes the text between special
tokens. It renders each kind of header once. Tool calls get the header that the engine gives them.

Source: vLLM 0.32.0,
entrypoints/openai/parser/harmony_utils.py (render_for_completion, _use_legacy_tool_call_headers).
"""

from __future__ import annotations

import importlib
from array import array
from typing import Any, Final

import orjson

from router.api.openai import TokenIds
from router.tokens.encoder import MarkedEncoder, split

FIELD: Final = "\x1f"
"""Separates the fields of a system message's key."""

_MAX_HEADERS = 1024
MAX_HEADER_CHARS = 4 << 20  # of all: a developer message's key contains all tools
_CHANNELS = {"a": "analysis", "c": "commentary", "f": "final"}


class HarmonyEncoder(MarkedEncoder):
    """Encodes marked text."""

    __slots__ = ("_encoding", "_frames", "_library", "_marks", "_num_chars")

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("openai_harmony")  # an optional extra
        self._encoding: Any = self._library.load_harmony_encoding(
            self._library.HarmonyEncodingName.HARMONY_GPT_OSS
        )
        self._frames: dict[str, tuple[TokenIds, TokenIds]] = {}
        self._num_chars = 0  # of their keys
        self._marks = [
            self._encoding.encode(f"<|{name}|>", allowed_special="all")[0]
            for name in ("start", "channel", "constrain", "message")
        ]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a prompt at once, as the library encodes a whole conversation."""
        messages = [self._message(key, texts) for key, texts in split(text) if key != "g"]
        ids = self._encoding.render_conversation_for_completion(
            self._library.Conversation.from_messages(messages),
            self._library.Role.ASSISTANT,
            config=self._library.RenderConversationConfig(auto_drop_analysis=False),
        )
        return array("I", self._with_legacy_headers(ids))

    def encode_marked(self, text: str) -> TokenIds:
        ids: TokenIds = array("I")
        for key, texts in split(text):
            header, end = self._frames.get(key) or self._frame(key)
            ids += header
            for each in texts:
                if each:
                    ids.extend(self._encoding.encode(each, disallowed_special=()))
            ids += end
        return ids

    def _frame(self, key: str) -> tuple[TokenIds, TokenIds]:
        """Return the tokens before and behind a message's texts."""
        if key == "g":
            start = self._marks[0]
            found = array("I", [start, *self._encoding.encode("assistant")]), array("I")
        else:
            has_functions = key.startswith("s") and key.endswith("True")
            options = self._library.RenderOptions(conversation_has_function_tools=has_functions)
            ids = self._encoding.render(self._message(key, [""]), options)
            ids = self._with_legacy_headers(ids)
            found = array("I", ids[:-1]), array("I", ids[-1:])
        if len(self._frames) >= _MAX_HEADERS or self._num_chars + len(key) > MAX_HEADER_CHARS:
            self._frames.clear()
            self._num_chars = 0
        self._frames[key] = found
        self._num_chars += len(key)
        return found

    def _message(self, key: str, texts: list[str]) -> Any:
        """Build the library's message of a key and texts."""
        kind, rest = key[0], key[1:]
        role, message = self._library.Role, self._library.Message
        if kind == "s":
            date, effort, _ = rest.split(FIELD)
            content = (
                self._library.SystemContent.new()
                .with_conversation_start_date(date)
                .with_reasoning_effort(self._library.ReasoningEffort(effort.capitalize()))
            )
            return message.from_role_and_content(role.SYSTEM, content)
        if kind == "d":
            return message.from_role_and_content(role.DEVELOPER, _developer(self._library, rest))
        contents = [self._library.TextContent(text=each) for each in texts]
        if kind == "u":
            return message.from_role_and_contents(role.USER, contents)
        if kind == "t":
            author = self._library.Author.new(role.TOOL, f"functions.{rest}")
            made = message(author=author, content=contents)
            return made.with_channel("commentary").with_recipient("assistant")
        made = message.from_role_and_contents(role.ASSISTANT, contents)
        if kind == "k":
            made = made.with_channel("commentary").with_recipient(f"functions.{rest}")
            return made.with_content_type("json")
        return made.with_channel(_CHANNELS[kind])

    def _with_legacy_headers(self, ids: list[int]) -> list[int]:
        """Move a call's recipient before its channel, where the engine puts it."""
        start, channel, constrain, message = self._marks
        encode, decode = self._encoding.encode, self._encoding.decode
        made: list[int] = []
        position = 0
        while position < len(ids):
            end = _find(ids, message, position + 1, len(ids)) if ids[position] == start else -1
            at_channel = _find(ids, channel, position + 1, end)
            at_type = _find(ids, constrain, at_channel + 1, end) if at_channel >= 0 else -1
            if end < 0 or at_channel < 0 or at_type < 0:
                made.append(ids[position])
                position += 1
                continue
            author = decode(ids[position + 1 : at_channel])
            name, found, recipient = decode(ids[at_channel + 1 : at_type]).partition(" to=")
            content_type = decode(ids[at_type + 1 : end])
            is_call = author == "assistant" and found and recipient.endswith(" ")
            if is_call and name and recipient[:-1] and content_type:
                made += [start, *encode(f"assistant to={recipient[:-1]}"), channel]
                made += [*encode(f"{name} {content_type}"), message]
            else:
                made += ids[position : end + 1]
            position = end + 1
        return made


def _developer(library: Any, rest: str) -> Any:
    instructions, tools = orjson.loads(rest)
    content = library.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        described = [
            library.ToolDescription.new(name=name, description=description, parameters=parameters)
            for name, description, parameters in tools
        ]
        content = content.with_function_tools(described)
    return content


def _find(ids: list[int], token: int, start: int, end: int) -> int:
    try:
        return ids.index(token, start, end) if end >= 0 else -1
    except ValueError:
        return -1
