"""The body for an engine's `/tokenize`, which makes the tokens of a prompt where we cannot."""

from __future__ import annotations

from typing import Any

from router.api.openai import ChatRequest, Json


def tokenize_body(body: Json) -> dict[str, Any]:
    """Build the body for an engine's `/tokenize` that yields the tokens of this chat or completion.

    That route knows fewer fields than the chat route, so its first steps are done here. Source:
    vLLM 0.32.0, serve/tokenize/protocol.py. `reasoning_content` is renamed. `reasoning_effort` and
    `documents` become template arguments. Exact for every request that the engine accepts, unless
    it runs with `--exclude-tools-when-tool-choice-none`.
    """
    sent = {field: body[field] for field in _TOKENIZE_FIELDS if body.get(field) is not None}
    if "messages" not in sent:
        return sent
    arguments = dict(sent.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments.setdefault("enable_thinking", effort != "none")
        arguments["reasoning_effort"] = effort
    if body.get("documents") is not None:
        arguments["documents"] = body["documents"]
    if arguments:
        sent["chat_template_kwargs"] = arguments
    sent["messages"] = [_with_reasoning(message) for message in sent["messages"]]
    return sent


def tokenize_chat(chat: ChatRequest) -> dict[str, Any]:
    """Build the same body of a request that came by another API and was converted."""
    fields = {
        "model": chat.model,
        "messages": list(chat.messages),
        "tools": chat.tools,
        "reasoning_effort": chat.reasoning_effort,
        "chat_template_kwargs": chat.chat_template_kwargs,
    }
    return tokenize_body(fields)


_TOKENIZE_FIELDS = (
    "model prompt messages tools add_generation_prompt continue_final_message add_special_tokens "
    "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs"
).split()


def _with_reasoning(message: Any) -> Any:
    if not isinstance(message, dict) or "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None and message["reasoning_content"] is not None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed
