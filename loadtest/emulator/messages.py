"""`/v1/messages` in the engine's HTTP shapes; vLLM converts the body to that of a chat.

Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (messages_full_converter,
message_stream_converter, _build_anthropic_usage), by the shape of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from loadtest.emulator.replies import Reply
from loadtest.emulator.wire import ApiError, Head, Usage
from router.api.anthropic import parse_messages
from router.api.engine_bodies import tokenize_chat

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TAKEN_OVER: Final = (
    "temperature top_p top_k cache_salt kv_transfer_params vllm_xargs seed emulator"
).split()


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a body to that of a chat, as the engine does.

    Raises:
        ApiError: The engine would refuse it.
    """
    own = {field: value for field, value in body.items() if field != "kv_transfer_params"}
    chat = parse_messages(own)
    if chat.engine_only is not None:
        raise ApiError(400, f"1 validation error:\n  {chat.engine_only}", type="Bad Request")
    converted: dict[str, Any] = {
        "model": chat.model,
        "messages": list(chat.messages),
        "tools": None if chat.tools is None else [_tool(tool) for tool in chat.tools],
        "tool_choice": chat.tool_choice,
        "chat_template_kwargs": tokenize_chat(chat).get("chat_template_kwargs"),
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "stream": chat.stream,
        **{field: body.get(field) for field in _TAKEN_OVER},
    }
    if chat.stream:
        converted["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return {field: value for field, value in converted.items() if value is not None}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out fields that a request model leaves out of its dump if they are null."""
    function = {
        key: value
        for key, value in tool["function"].items()
        if value is not None or key not in ("strict", "defer_loading")
    }
    return {**tool, "function": function}


def error_body(error: ApiError) -> bytes:
    """Write an error of the engine's handler in this API's shape."""
    given = orjson.loads(error.body)["error"]
    return orjson.dumps(
        {"type": "error", "error": {key: given[key] for key in ("type", "message")}}
    )


def usage_fields(usage: Usage) -> dict[str, int]:
    """Write the usage; tokens read from the cache and written to it are counted separately."""
    created = usage.num_created_tokens or 0
    return {
        "input_tokens": max(0, usage.num_prompt_tokens - usage.num_cached_tokens - created),
        "output_tokens": usage.num_completion_tokens,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.num_cached_tokens,
    }


class MessageWriter:
    """Writes an answer, see answers.AnswerWriter."""

    def __init__(self, head: Head, reply: Reply, num_prompt_tokens: int) -> None:
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._reply = reply
        self._block: str | None = None  # the open block's type

    def start(self) -> bytes:
        return b""  # `message_start` comes with the first tokens

    def failure(self, error: ApiError) -> bytes:
        return _event("error", error={"type": "internal_error", "message": str(error)})

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        opening = self._message_start() if start == 0 else b""
        return opening + self._tokens(start, stop)

    def end(self, usage: Usage) -> bytes:
        """Write the end; its event has the whole usage."""
        opening = b"" if self._reply.ids else self._message_start()  # of an abort
        closing = _event("content_block_stop", index=0) if self._block is not None else b""
        ended = _event("message_delta", delta=_stop(self._reply), usage=usage_fields(usage))
        return opening + closing + ended + _event("message_stop")

    def whole(self, usage: Usage) -> bytes:
        block: dict[str, Any] = {"type": "text", "text": self._reply.text()}
        if self._reply.tool_call is not None:
            call = self._reply.tool_call
            try:
                given = orjson.loads(self._reply.arguments())
            except orjson.JSONDecodeError:
                given = {}
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
        return orjson.dumps(
            {
                **_head(self._head),
                "content": [block],
                **_stop(self._reply),
                "usage": usage_fields(usage),
            }
        )

    def _message_start(self) -> bytes:
        """Write the beginning: cached tokens are not known yet, so the whole prompt is new."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None}
        begun = {**_head(self._head), "content": [], **ends, "usage": usage}
        return _event("message_start", message=begun)

    def _tokens(self, start: int, stop: int) -> bytes:
        """Write tokens [start, stop) of the reply; nothing if they have no text."""
        call = self._reply.tool_call
        if call is None:
            text = self._reply.text(start, stop)
            if not text:
                return b""
            opening = self._open({"type": "text", "text": ""})
            return opening + self._delta({"type": "text_delta", "text": text})
        events = b""
        if stop >= call.start:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._open(block)
        if part := self._reply.arguments(start, stop):
            events += self._delta({"type": "input_json_delta", "partial_json": part})
        return events

    def _open(self, block: dict[str, Any]) -> bytes:
        if self._block is not None:
            return b""
        self._block = block["type"]
        return _event("content_block_start", content_block=block, index=0)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", delta=delta, index=0)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _stop(reply: Reply) -> dict[str, str | None]:
    reason = "stop_sequence" if reply.stop_reason else _STOP_REASONS.get(reply.finish_reason)
    return {"stop_reason": reason, "stop_sequence": reply.stop_reason}
