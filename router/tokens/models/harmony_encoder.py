"""Make token ids of gpt-oss prompts (see `harmony`), by OpenAI's harmony library.

The library (the extra `harmony`; it brings its vocabulary) encodes the text between special
tokens. It renders each kind of header once. Tool calls get the header that the engine gives them.

Source: vLLM 0.32.0,
entrypoints/openai/parser/harmony_utils.py (render_for_completion, _use_legacy_tool_call_headers).
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from router.api.openai import TokenIds
from router.tokens.encoder import Framed, FramedEncoder, pack

MAX_HEADER_BYTES = 4 << 20  # of all: a developer message's header contains all tools
_MAX_HEADERS = 1024


class SystemHeader(Struct, frozen=True, array_like=True, tag=True):
    """The system message, which has no text.

    date: In ISO form.
    """

    date: str
    effort: str
    has_functions: bool


class FunctionTool(Struct, frozen=True, array_like=True):
    """A function that the model may call."""

    name: str
    description: str
    parameters: Any


class DeveloperHeader(Struct, frozen=True, array_like=True, tag=True):
    """A developer's message: the library writes its text."""

    instructions: str | None
    tools: tuple[FunctionTool, ...] = ()


class MessageHeader(Struct, frozen=True, array_like=True, tag=True):
    """The header of any other message, as the library describes it.

    author: The function that answers, if a tool does.
    """

    role: str
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    author: str | None = None


OPENING: Final = MessageHeader("assistant")
"""Opens the answer: nothing follows."""


class HarmonyEncoder(FramedEncoder):
    """Encodes messages behind headers."""

    __slots__ = ("_encoding", "_frames", "_library", "_marks", "_num_bytes")

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("openai_harmony")  # an optional extra
        self._encoding: Any = self._library.load_harmony_encoding(
            self._library.HarmonyEncodingName.HARMONY_GPT_OSS
        )
        self._frames: dict[bytes, tuple[TokenIds, TokenIds]] = {}
        self._num_bytes = 0  # of their keys
        self._marks = [
            self._encoding.encode(f"<|{name}|>", allowed_special="all")[0]
            for name in ("start", "channel", "constrain", "message")
        ]

    def encode_whole(self, parts: Sequence[Framed]) -> TokenIds:
        """Encode a prompt at once, as the library encodes a whole conversation."""
        messages = [self._message(each.header, each.texts) for each in parts[:-1]]  # not `OPENING`
        ids = self._encoding.render_conversation_for_completion(
            self._library.Conversation.from_messages(messages),
            self._library.Role.ASSISTANT,
            config=self._library.RenderConversationConfig(auto_drop_analysis=False),
        )
        return array("I", self._with_legacy_headers(ids))

    def encode(self, parts: Sequence[Framed]) -> TokenIds:
        ids: TokenIds = array("I")
        for part in parts:
            key = pack(part.header)
            before, behind = self._frames.get(key) or self._frame(key, part.header)
            ids += before
            for each in part.texts:
                if each:
                    ids.extend(self._encoding.encode(each, disallowed_special=()))
            ids += behind
        return ids

    def _frame(self, key: bytes, header: Any) -> tuple[TokenIds, TokenIds]:
        """Return the tokens before and behind a message's texts."""
        if header == OPENING:
            start = self._marks[0]
            found = array("I", [start, *self._encoding.encode("assistant")]), array("I")
        else:
            has_functions = isinstance(header, SystemHeader) and header.has_functions
            options = self._library.RenderOptions(conversation_has_function_tools=has_functions)
            ids = self._encoding.render(self._message(header, ("",)), options)
            ids = self._with_legacy_headers(ids)
            found = array("I", ids[:-1]), array("I", ids[-1:])
        if len(self._frames) >= _MAX_HEADERS or self._num_bytes + len(key) > MAX_HEADER_BYTES:
            self._frames.clear()
            self._num_bytes = 0
        self._frames[key] = found
        self._num_bytes += len(key)
        return found

    def _message(self, header: Any, texts: Sequence[str]) -> Any:
        """Build the library's message of a header and texts."""
        library = self._library
        match header:
            case SystemHeader():
                effort = library.ReasoningEffort(header.effort.capitalize())
                content = library.SystemContent.new().with_conversation_start_date(header.date)
                content = content.with_reasoning_effort(effort)
                return library.Message.from_role_and_content(library.Role.SYSTEM, content)
            case DeveloperHeader():
                content = library.DeveloperContent.new()
                if header.instructions is not None:
                    content = content.with_instructions(header.instructions)
                if header.tools:
                    tools = [library.ToolDescription.new(**asdict(tool)) for tool in header.tools]
                    content = content.with_function_tools(tools)
                return library.Message.from_role_and_content(library.Role.DEVELOPER, content)
        return library.Message(
            author=library.Author(role=library.Role(header.role), name=header.author),
            content=[library.TextContent(text=each) for each in texts],
            channel=header.channel,
            recipient=header.recipient,
            content_type=header.content_type,
        )

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


def _find(ids: list[int], token: int, start: int, end: int) -> int:
    try:
        return ids.index(token, start, end) if end >= 0 else -1
    except ValueError:
        return -1
