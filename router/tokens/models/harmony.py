"""gpt-oss: from a chat request to messages behind headers, which `harmony_encoder` encodes.

The engine renders these chats with OpenAI's harmony library, message by message, and ignores the
chat template. A message's texts are encoded apart from its header and never contain a special
token.

Source: vLLM 0.32.0, renderers/online_renderer.py (_make_request_with_harmony),
entrypoints/openai/parser/harmony_utils.py.

A Responses request is converted item by item, not through a chat, but only for requests that
`router.api.responses` could convert. Other unusual items are left to the engine. Source: vLLM
0.32.0, renderers/online_renderer.py (_render_responses_with_harmony),
entrypoints/openai/responses/harmony.py (response_input_to_harmony).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

from router.api.openai import ChatRequest, Json
from router.base.errors import TemplateFailed
from router.tokens.conversation import (
    JsonMemo,
    build_tools,
    check_calls,
    check_message,
    reasoning_of,
    text_parts,
)
from router.tokens.encoder import Framed, TextEncoder
from router.tokens.model_files import ModelFiles
from router.tokens.models import missing
from router.tokens.models.harmony_encoder import (
    OPENING,
    DeveloperHeader,
    FunctionTool,
    HarmonyEncoder,
    MessageHeader,
    SystemHeader,
)
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter
from router.tokens.templates import ChatRenderer, NoRenderer, Renderer, continued_and_begun

_USER: Final = MessageHeader("user")
_ANALYSIS: Final = MessageHeader("assistant", "analysis")
_COMMENTARY: Final = MessageHeader("assistant", "commentary")
_FINAL: Final = MessageHeader("assistant", "final")
_INSTRUCTS: Final = ("system", "developer")
_STATUSES: Final = (None, "in_progress", "completed", "incomplete")


def split_items(body: Json) -> tuple[str | None, Sequence[Json]]:
    """Return the instructions and the items behind them.

    Raises:
        NeedsEngine: there is something besides instructions, input and functions.
    """
    if body.get("previous_input_messages") is not None:
        raise NeedsEngine("field", "previous_input_messages")
    if any(tool.get("type") != "function" for tool in body.get("tools") or ()):
        raise NeedsEngine("tools", "type")
    instructions, given = body.get("instructions"), body.get("input")
    if isinstance(given, str):
        return instructions, [{"role": "user", "content": given}]
    if type(given) is not list:
        raise NeedsEngine("field", "input")
    items: Sequence[Json] = given
    if instructions is None and items and items[0].get("role") in _INSTRUCTS:
        return _item_text(items[0].get("content")), items[1:]
    return instructions, items


def item_messages(items: Sequence[Json]) -> Iterator[Framed]:
    """Yield the items as messages.

    Raises:
        NeedsEngine, TemplateFailed: as `Renderer.render`.
    """
    names: dict[str, str] = {}  # by call
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            yield from _message(item)
        elif kind == "reasoning":
            content = item.get("content")
            if content:
                yield Framed(_ANALYSIS, ("\n".join(_item_texts(content)),))
        elif kind == "function_call":
            if item.get("namespace") is not None or item.get("status") not in _STATUSES:
                raise NeedsEngine("message", "item")
            if "<|" in item["name"]:
                raise NeedsEngine("tool_calls", "name")
            names[item["call_id"]] = item["name"]
            yield _call(item["name"], item["arguments"])
        elif kind == "function_call_output":
            if type(item["output"]) is not str or type(item.get("call_id")) is not str:
                raise NeedsEngine("message", "item")
            name = names.get(item["call_id"])
            if name is None:
                raise TemplateFailed("an output has no call before it", param="input")
            yield _result(name, item["output"])
        else:
            raise NeedsEngine("message", "item")


def _message(item: Json) -> Iterator[Framed]:
    role, content = item["role"], item["content"]
    if role in _INSTRUCTS:
        text = _item_text(content)
        if text:
            yield _developer(text)
        return
    yield Framed(_FINAL if role == "assistant" else _USER, _item_texts(content))


def _item_texts(content: Any) -> tuple[str, ...]:
    if type(content) is str:
        return (content,)
    texts = [part.get("text") if type(part) is dict else None for part in content]
    if not texts or not all(type(text) is str for text in texts):
        raise NeedsEngine("message", "content part")
    return tuple(map(str, texts))


def _item_text(content: Any) -> str | None:
    return content if content is None else "".join(_item_texts(content))


_EFFORTS = frozenset({"low", "medium", "high"})


def load(files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model's tokenizer, for texts, and the library, for chats; see `models`."""
    tokenizer = files.tokenizer()
    templates = files.templates(tokenizer)
    encoder = TextEncoder(tokenizer.backend_tokenizer, templates.hints())
    lacking = missing("openai_harmony", "harmony")
    if lacking is not None:
        return Prompter(encoder, NoRenderer(lacking), asks_engine=False, max_bytes=max_bytes)
    unused = ChatRenderer(templates.find, tokenizer.special_tokens_map, release=files.release)
    return Prompter(
        encoder,
        HarmonyRenderer(unused.wants_system_first),
        chat_encoder=HarmonyEncoder(),
        asks_engine=False,
        max_bytes=max_bytes,
    )


class HarmonyRenderer(Renderer):
    """Renders chat requests of gpt-oss. The engine's date is at the beginning of every prompt.

    Args:
        wants_system_first: See `Renderer.wants_system_first`. The engine tries out the model's
            Jinja template, though it does not render it.
    """

    is_dated: ClassVar[bool] = True

    __slots__ = ("_wants_system_first",)

    def __init__(self, wants_system_first: Callable[[], bool]) -> None:
        super().__init__()
        self._wants_system_first = wants_system_first

    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[Framed]:
        if request.engine_only is not None:
            raise NeedsEngine("field", request.engine_only)
        if request.continue_final_message and request.add_generation_prompt:
            raise continued_and_begun()
        instructions, conversation = _read(request)
        effort = request.reasoning_effort
        if effort is not None and effort not in _EFFORTS:
            raise TemplateFailed(
                f"gpt-oss has no `reasoning_effort` {effort!r}", param="reasoning_effort"
            )
        tools = tuple(map(_tool, build_tools(request.tools, memo) or ()))
        header = SystemHeader(self.today().isoformat(), effort or "medium", bool(tools))
        parts = [Framed(header)]
        if instructions or tools:
            parts.append(_developer(instructions, tools))
        return [*parts, *_current(conversation), Framed(OPENING)]

    def wants_system_first(self) -> bool:
        return self._wants_system_first()


def _read(request: ChatRequest) -> tuple[str | None, list[Framed]]:
    """Return the instructions and the messages.

    Raises:
        NeedsEngine, TemplateFailed: as `HarmonyRenderer.render`.
    """
    if request.renders_as == "responses":
        if request.responses_body is None:
            raise NeedsEngine("field", "responses")
        instructions, items = split_items(request.responses_body)
        return instructions, list(item_messages(items))
    messages = request.messages
    instructions = None
    if messages and messages[0]["role"] in _INSTRUCTS:
        instructions = _joined(_checked(messages[0]))
        messages = messages[1:]
    return instructions, list(_messages(messages))


def _checked(message: Json) -> Json:
    """Return a message after `check_message`, which raises."""
    check_message(message)
    return message


def _tool(tool: Json) -> FunctionTool:
    function = tool["function"]
    return FunctionTool(function["name"], function["description"] or "", function["parameters"])


def _developer(instructions: str | None, tools: tuple[FunctionTool, ...] = ()) -> Framed:
    try:
        return Framed(DeveloperHeader(instructions, tools))
    except (TypeError, ValueError, RecursionError) as exc:  # half a character, too many levels
        raise NeedsEngine("tools", type(exc).__name__) from exc


def _call(name: str, arguments: str) -> Framed:
    header = MessageHeader("assistant", "commentary", f"functions.{name}", "json")
    return Framed(header, (arguments,))


def _result(name: str, text: str) -> Framed:
    header = MessageHeader("tool", "commentary", "assistant", author=f"functions.{name}")
    return Framed(header, (text,))


def _messages(messages: Sequence[Json]) -> Iterator[Framed]:
    """Yield the messages behind the instructions.

    Raises:
        NeedsEngine, TemplateFailed: as `HarmonyRenderer.render`.
    """
    names: dict[Any, str] = {}  # by call
    for message in messages:
        for call in _calls(_checked(message)):
            names[call["id"]] = call["function"]["name"]
    for message in messages:
        role = message["role"]
        if role == "assistant":
            yield from _assistant(message)
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "")
            yield _result(name, _joined(message) or "")
        elif role in _INSTRUCTS:
            instructions = _joined(message)
            if instructions is not None:
                yield _developer(instructions)
        elif role == "user":
            yield Framed(_USER, _texts(message))
        else:
            raise TemplateFailed(f"gpt-oss has no role {role!r}", param="messages")


def _assistant(message: Json) -> Iterator[Framed]:
    calls = _calls(message)
    reasoning = reasoning_of(message)
    if calls:
        content = _joined(message)
        if content:
            yield Framed(_COMMENTARY, (content,))
        if reasoning:
            yield Framed(_ANALYSIS, (reasoning,))
        for call in calls:
            function = call["function"]
            yield _call(function["name"], function["arguments"])
        return
    if reasoning:
        yield Framed(_ANALYSIS, (reasoning,))
    texts = _texts(message)
    if texts[0]:
        yield Framed(_FINAL, texts)


def _calls(message: Json) -> Sequence[Json]:
    """Return a message's calls.

    Raises:
        NeedsEngine: they are malformed, or a header cannot contain a name.
    """
    if "tool_calls" not in message:
        return ()
    calls = check_calls(message["tool_calls"])
    if any("<|" in call["function"]["name"] for call in calls):
        raise NeedsEngine("tool_calls", "name")
    return calls


def _texts(message: Json) -> tuple[str, ...]:
    content = message.get("content")
    if not content:
        return ("",)
    return (content,) if type(content) is str else tuple([p["text"] for p in text_parts(message)])


def _joined(message: Json) -> str | None:
    """Join a message's texts; None: it has no text."""
    content = message.get("content")
    if content is None or type(content) is str:
        return content
    return "".join([part["text"] for part in text_parts(message)]) if content else None


def _current(parts: list[Framed]) -> list[Framed]:
    """Drop the analysis before the last final answer, as the library does."""
    last_final = max((i for i, part in enumerate(parts) if part.header == _FINAL), default=-1)
    return [part for i, part in enumerate(parts) if i >= last_final or part.header != _ANALYSIS]
