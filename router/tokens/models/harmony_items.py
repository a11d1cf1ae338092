"""Convert a Responses request to gpt-oss messages, item by item instead of through a chat.

Only for requests that `router.api.responses` could convert. Other unusual items are left to the
engine. Source: vLLM 0.32.0, renderers/online_renderer.py (_render_responses_with_harmony),
entrypoints/openai/responses/harmony.py (response_input_to_harmony).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from router.api.openai import Json
from router.base.errors import TemplateFailed
from router.tokens.needs_engine import NeedsEngine

Piece = tuple[str, tuple[str, ...]]
"""A message: its header's key (see `harmony`) and its texts."""

_INSTRUCTING: Final = ("system", "developer")
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
    if instructions is None and items and items[0].get("role") in _INSTRUCTING:
        return _joined(items[0].get("content")), items[1:]
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
                yield "a", ("\n".join(_texts(content)),)
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
    if role in _INSTRUCTING:
        text = _joined(content)
        if text:
            yield text
        return
    yield "f" if role == "assistant" else "u", _texts(content)


def _texts(content: Any) -> tuple[str, ...]:
    if type(content) is str:
        return (content,)
    texts = [part.get("text") if type(part) is dict else None for part in content]
    if not texts or not all(type(text) is str for text in texts):
        raise NeedsEngine("message", "content part")
    return tuple(map(str, texts))


def _joined(content: Any) -> str | None:
    return content if content is None else "".join(_texts(content))
