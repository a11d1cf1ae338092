"""A turn of an agent by each API: its body, and what its streamed answer says.

What must live here: chat requests as Messages and Responses write them, and where each API's stream
has usage and text. What must not: sending (`apis`), what sessions say (`loadtest.agents`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, Literal

import orjson
from msgspec import Struct

Api = Literal["chat", "messages", "responses"]
Json = dict[str, Any]

APIS: Final[tuple[Api, ...]] = ("chat", "messages", "responses")
PATHS: Final[dict[Api, str]] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_PASSED: Final = ("model", "temperature", "cache_salt")


class Reported(Struct, frozen=True, kw_only=True):
    """What an answer says: its prompt's tokens, those of them found in a cache, its text."""

    num_prompt_tokens: int
    num_cached_tokens: int
    text: str


def body_of(api: Api, chat: Json) -> Json:
    """Write a chat request (see `loadtest.agents`) as a streamed request of an API."""
    if api == "chat":
        return {**chat, "stream": True, "stream_options": {"include_usage": True}}
    passed = {key: chat[key] for key in _PASSED if key in chat} | {"stream": True}
    system, *messages = chat["messages"]
    tools = [tool["function"] for tool in chat["tools"]]
    if api == "responses":
        return {
            **passed,
            "instructions": system["content"],
            "input": [item for message in messages for item in _items(message)],
            "tools": [{"type": "function", **tool} for tool in tools],
            "max_output_tokens": chat["max_tokens"],
            "store": False,
        }
    return {
        **passed,
        "system": [{"type": "text", "text": system["content"]}],
        "messages": _messages(messages),
        "tools": [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": tool["parameters"],
            }
            for tool in tools
        ],
        "max_tokens": chat["max_tokens"],
    }


def read(api: Api, lines: Iterable[bytes]) -> Reported:
    """Read the lines of a streamed answer.

    Raises:
        ValueError: it has an error event, or ends without usage.
    """
    usage: Json | None = None
    text: list[str] = []
    for line in lines:
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        event: Json = orjson.loads(line[5:])
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise ValueError(f"error in the stream: {line[:300].decode(errors='replace')}")
        said, found = _READERS[api](event)
        text.append(said)
        usage = found or usage
    if usage is None:
        raise ValueError("the stream ended without usage")
    num_prompt_tokens, num_cached_tokens = _counts(api, usage)
    return Reported(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        text="".join(text),
    )


# -- bodies --------------------------------------------------------------------------------------


def _items(message: Json) -> Iterable[Json]:
    """Write a message as items, parts in lists as Codex sends them."""
    if message["role"] == "tool":
        call_id, output = message["tool_call_id"], message["content"]
        yield {"type": "function_call_output", "call_id": call_id, "output": output}
        return
    if message["content"]:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": message["content"]}]
        yield {"type": "message", "role": message["role"], "content": content}
    for call in message.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _messages(messages: Iterable[Json]) -> list[Json]:
    """Write messages as blocks, the results of parallel calls in one message."""
    written: list[Json] = []
    for message in messages:
        blocks: list[Json] = []
        if message["role"] == "tool":
            call_id, content = message["tool_call_id"], message["content"]
            blocks.append({"type": "tool_result", "tool_use_id": call_id, "content": content})
        elif message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": arguments,
                }
            )
        role = "user" if message["role"] == "tool" else message["role"]
        if message["role"] == "tool" and written[-1]["role"] == "user":
            written[-1]["content"] += blocks
        else:
            written.append({"role": role, "content": blocks})
    return written


# -- answers -------------------------------------------------------------------------------------


def _of_chat(event: Json) -> tuple[str, Json | None]:
    said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return said, event.get("usage")


def _of_messages(event: Json) -> tuple[str, Json | None]:
    if event["type"] == "content_block_delta":
        return event["delta"].get("text") or "", None
    return "", event["usage"] if event["type"] == "message_delta" else None


def _of_responses(event: Json) -> tuple[str, Json | None]:
    if event["type"] == "response.output_text.delta":
        return event["delta"], None
    is_last = event["type"] in ("response.completed", "response.incomplete")
    return "", event["response"]["usage"] if is_last else None


_READERS: Final = {"chat": _of_chat, "messages": _of_messages, "responses": _of_responses}


def _counts(api: Api, usage: Json) -> tuple[int, int]:
    """Return a prompt's tokens and the cached ones.

    Anthropic's input is what was neither read from a cache nor written to one.
    """
    if api == "chat":
        details = usage.get("prompt_tokens_details") or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0
    if api == "responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    num_cached_tokens = usage.get("cache_read_input_tokens") or 0
    num_written_tokens = usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + num_cached_tokens + num_written_tokens, num_cached_tokens
