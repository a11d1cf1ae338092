"""gpt-oss: from a chat request to a prompt in marked text, which `harmony_encoder` encodes.

The engine renders these chats with OpenAI's harmony library, message by message, and ignores the
chat template. A message's texts are encoded apart from its header and never contain a special
token. So a prompt is a row of messages, each with the key of its header:

    MARK key TEXT text [TEXT text …]

    key                      message
    s date effort flag       the system message; the flag: there are functions
    d [instructions, tools]  a developer's, in JSON; tools: [name, description, parameters] each
    u  a  c  f               a user's; the assistant's analysis, commentary and final answer
    k name  t name           a call of a function, and its result
    g                        the header that opens the answer

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

import orjson

from router.api.openai import ChatRequest, Json
from router.base.errors import TemplateFailed
from router.tokens.conversation import (
    build_tools,
    check_calls,
    check_message,
    reasoning_of,
    text_parts,
)
from router.tokens.encoder import MARK, TEXT, TextEncoder, escaped
from router.tokens.model_files import ModelFiles
from router.tokens.models import missing
from router.tokens.models.harmony_encoder import FIELD, HarmonyEncoder
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter
from router.tokens.templates import ChatRenderer, NoRenderer, Renderer, continued_and_begun

Piece = tuple[str, tuple[str, ...]]
"""A message: its header's key (see `harmony`) and its texts."""

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


def item_pieces(items: Sequence[Json]) -> Iterator[Piece | str]:
    """Yield the items as messages; a developer's message as its text alone.

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
                yield "a", ("\n".join(_item_texts(content)),)
        elif kind == "function_call":
            if item.get("namespace") is not None or item.get("status") not in _STATUSES:
                raise NeedsEngine("message", "item")
            if "<|" in item["name"]:
                raise NeedsEngine("tool_calls", "name")
            names[item["call_id"]] = item["name"]
            yield f"k{item['name']}", (item["arguments"],)
        elif kind == "function_call_output":
            if type(item["output"]) is not str or type(item.get("call_id")) is not str:
                raise NeedsEngine("message", "item")
            name = names.get(item["call_id"])
            if name is None:
                raise TemplateFailed("an output has no call before it", param="input")
            yield f"t{name}", (item["output"],)
        else:
            raise NeedsEngine("message", "item")


def _message(item: Json) -> Iterator[Piece | str]:
    role, content = item["role"], item["content"]
    if role in _INSTRUCTS:
        text = _item_text(content)
        if text:
            yield text
        return
    yield "f" if role == "assistant" else "u", _item_texts(content)


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
_INSTRUCTING = frozenset({"system", "developer"})


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

    def render_parts(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> Sequence[str]:
        """Render the prompt's marked text; see `Renderer.render_parts`."""
        memo = self._memo_of(owner, is_alone=by_the_book or apart)
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
        tools = [_tool(tool) for tool in build_tools(request.tools, memo) or ()]
        key = FIELD.join([f"s{self.today().isoformat()}", effort or "medium", str(bool(tools))])
        pieces: list[Piece] = [(key, ())]
        if instructions or tools:
            pieces.append(_developer(instructions, tools or None))
        pieces += _current(conversation)
        pieces.append(("g", ()))
        return list(map(_written, pieces))

    def wants_system_first(self) -> bool:
        return self._wants_system_first()


def _read(request: ChatRequest) -> tuple[str | None, list[Piece]]:
    """Return the instructions and the messages.

    Raises:
        NeedsEngine, TemplateFailed: as `HarmonyRenderer.render`.
    """
    if request.renders_as == "responses":
        if request.responses_body is None:
            raise NeedsEngine("field", "responses")
        instructions, items = split_items(request.responses_body)
        pieces = item_pieces(items)
        return instructions, [
            _developer(piece, None) if isinstance(piece, str) else piece for piece in pieces
        ]
    messages = request.messages
    instructions = None
    if messages and messages[0]["role"] in _INSTRUCTING:
        instructions = _joined(_checked(messages[0]))
        messages = messages[1:]
    return instructions, list(_pieces(messages))


def _checked(message: Json) -> Json:
    """Return a message after `check_message`, which raises."""
    check_message(message)
    return message


def _tool(tool: Json) -> list[Any]:
    function = tool["function"]
    return [function["name"], function["description"] or "", function["parameters"]]


def _developer(instructions: str | None, tools: Sequence[Any] | None) -> Piece:
    try:
        return "d" + orjson.dumps([instructions, tools]).decode(), ()
    except (TypeError, ValueError) as exc:  # half a character, too many levels
        raise NeedsEngine("tools", type(exc).__name__) from exc


def _pieces(messages: Sequence[Json]) -> Iterator[Piece]:
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
            yield f"t{name}", (_joined(message) or "",)
        elif role in _INSTRUCTING:
            instructions = _joined(message)
            if instructions is not None:
                yield _developer(instructions, None)
        elif role == "user":
            yield "u", _texts(message)
        else:
            raise TemplateFailed(f"gpt-oss has no role {role!r}", param="messages")


def _assistant(message: Json) -> Iterator[Piece]:
    calls = _calls(message)
    reasoning = reasoning_of(message)
    if calls:
        content = _joined(message)
        if content:
            yield "c", (content,)
        if reasoning:
            yield "a", (reasoning,)
        for call in calls:
            function = call["function"]
            yield f"k{function['name']}", (function["arguments"],)
        return
    if reasoning:
        yield "a", (reasoning,)
    texts = _texts(message)
    if texts[0]:
        yield "f", texts


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


def _current(pieces: list[Piece]) -> list[Piece]:
    """Drop the analysis before the last final answer, as the library does."""
    last_final = max((i for i, (key, _) in enumerate(pieces) if key == "f"), default=-1)
    return [piece for i, piece in enumerate(pieces) if i >= last_final or piece[0] != "a"]


def _written(piece: Piece) -> str:
    key, texts = piece
    return MARK + escaped(key) + "".join([TEXT + escaped(text) for text in texts])
