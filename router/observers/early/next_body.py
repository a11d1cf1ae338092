"""Write the request that a client is likely to send next, as far as it is known.

That is the conversation, the answer as clients send it back, and a new message whose text is not
known. Reasoning is sent back if the client has done so before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from router.observers.early.answer_text import AnswerText

_REASONING: Final = ("reasoning", "reasoning_content")


def next_body(
    path: str, body: Mapping[str, Any], answer: AnswerText, new_text: str
) -> dict[str, Any] | None:
    """Add an answer and a new message to a request's body. None: that API is not known."""
    write = _WRITERS.get(path)
    text, reasoning = answer.text.decode(), answer.reasoning.decode()
    return write(body, text, reasoning, new_text) if write is not None else None


def _chat(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    for name in _REASONING:
        if reasoning and any(message.get(name) for message in messages):
            answer[name] = reasoning
    return {**body, "messages": [*messages, answer, {"role": "user", "content": new_text}]}


def _message(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if reasoning and any(map(_thinks, messages)):
        blocks.insert(0, {"type": "thinking", "thinking": reasoning, "signature": ""})
    question = {"role": "user", "content": [{"type": "text", "text": new_text}]}
    answer = {"role": "assistant", "content": blocks}
    return {**body, "messages": [*messages, answer, question]}


def _thinks(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") == "thinking" for block in content
    )


def _response(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    items = body.get("input")
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list) or body.get("previous_response_id") is not None:
        return None
    part = {"type": "output_text", "text": text, "annotations": []}
    said: list[dict[str, Any]] = [{"type": "message", "role": "assistant", "content": [part]}]
    if reasoning and any(item.get("type") == "reasoning" for item in items):
        thought = {"type": "reasoning_text", "text": reasoning}
        said.insert(0, {"type": "reasoning", "summary": [], "content": [thought]})
    asked = {
        "type": "message", "role": "user", "content": [{"type": "input_text", "text": new_text}],
    }  # fmt: skip
    return {**body, "input": [*items, *said, asked]}


_WRITERS: Final[dict[str, Callable[[Mapping[str, Any], str, str, str], dict[str, Any] | None]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
