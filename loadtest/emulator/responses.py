"""`/v1/responses` in the engine's HTTP shapes; the body becomes that of a chat, none is kept.

Source: vLLM 0.32.0, entrypoints/openai/responses (serving.py, streaming_events.py, the simple way).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from loadtest.emulator.replies import Reply
from loadtest.emulator.wire import ApiError, Head, Usage
from router.api.responses import parse_responses

_TAKEN_OVER: Final = (
    "temperature top_p top_k cache_salt kv_transfer_params vllm_xargs seed emulator"
).split()


class Asked(Struct, frozen=True):
    """A request as the body of a chat, and the fields that its answer repeats."""

    chat: dict[str, Any]
    echo: dict[str, Any]


def read_asked(body: Mapping[str, Any]) -> Asked:
    """Convert a body to that of a chat, as the engine does.

    Raises:
        ApiError: The engine would refuse it.
    """
    for field in ("background", "previous_response_id"):
        if body.get(field):
            message = f"{field} is not emulated"
            raise ApiError(400, message, type="invalid_request_error", param=field)
    parsed = parse_responses({**body, "kv_transfer_params": None})
    if parsed.engine_only is not None:
        raise ApiError(400, f"1 validation error:\n  {parsed.engine_only}", type="Bad Request")
    chat: dict[str, Any] = {
        "model": parsed.model,
        "messages": _without_developer(parsed.messages),
        "tools": parsed.tools,
        "tool_choice": parsed.tool_choice,
        "chat_template_kwargs": parsed.chat_template_kwargs,
        "continue_final_message": parsed.continue_final_message or None,
        "max_tokens": parsed.max_tokens,
        "add_special_tokens": True,
        "stream": parsed.stream,
        **{field: body.get(field) for field in _TAKEN_OVER},
    }
    return Asked(
        chat={field: value for field, value in chat.items() if value is not None},
        echo={
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "previous_response_id": None,
        },
    )


def _without_developer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Join system and developer messages to one system message, as for most templates."""
    if all(message["role"] != "developer" for message in messages):
        return list(messages)
    instructions = [message for message in messages if message["role"] in ("system", "developer")]
    text = "\n\n".join(filter(None, map(_text, instructions)))
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": text}, *others]


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _split(name: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Split a function's name as the model sees it into its namespace and its own name."""
    for tool in tools:
        if tool.get("type") == "namespace" and name.startswith(f"{tool.get('name')}__"):
            return tool["name"], name.removeprefix(f"{tool['name']}__")
    return None, name


class ResponseWriter:
    """Writes an answer, see answers.AnswerWriter; `response` is the answer so far."""

    def __init__(self, head: Head, asked: Asked, reply: Reply) -> None:
        self._head = head
        self._asked = asked
        self._reply = reply
        self._item: dict[str, Any] | None = None  # that has begun
        self._number = 0
        self.response = self._response("in_progress", [], None)

    def start(self) -> bytes:
        begun = (self._event(f"response.{kind}", response=self.response) for kind in _BEGUN)
        return b"".join(begun)

    def failure(self, error: ApiError) -> None:
        return None  # as vLLM: writing the error raises

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        call = self._reply.tool_call
        if call is None:
            text = self._reply.text(start, stop)
            return self._open() + self._delta("output_text", text) if text else b""
        events = self._open() if stop >= call.start else b""
        if part := self._reply.arguments(start, stop):
            events += self._delta("function_call_arguments", part)
        return events

    def end(self, usage: Usage) -> bytes:
        """End the open item, and repeat all of the response, with the usage."""
        events = self._close() if self._item is not None else b""
        self.whole(usage)
        return events + self._event("response.completed", response=self.response)

    def whole(self, usage: Usage) -> bytes:
        items = [self._whole_item()] if self._reply.text() or self._reply.tool_call else []
        status = "incomplete" if self._reply.finish_reason == "length" else "completed"
        if self._reply.finish_reason == "abort" and self._reply.ids:
            status = "cancelled"  # of parsers that count tokens; the others say "completed"
        self.response = self._response(status, items, usage)
        return orjson.dumps(self.response)

    def _open(self) -> bytes:
        if self._item is not None:
            return b""
        whole = self._whole_item()
        empty: dict[str, Any] = {"content": []} if "content" in whole else {"arguments": ""}
        self._item = whole | empty | {"status": "in_progress"}
        events = self._event("response.output_item.added", item=self._item, output_index=0)
        if self._reply.tool_call is None:
            part = whole["content"][0] | {"text": ""}
            events += self._event("response.content_part.added", part=part, **self._place())
        return events

    def _delta(self, kind: str, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"response.{kind}.delta", delta=text, **more, **self._place())

    def _close(self) -> bytes:
        whole = self._whole_item()
        if self._reply.tool_call is None:
            part = whole["content"][0]
            place = self._place()
            events = self._event("response.output_text.done", text=part["text"], **place)
            events += self._event("response.content_part.done", part=part, **place)
        else:
            place = {"item_id": whole["id"], "output_index": 0}
            done = {"arguments": whole["arguments"], "name": whole["name"]}
            events = self._event("response.function_call_arguments.done", **done, **place)
        return events + self._event("response.output_item.done", item=whole, output_index=0)

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._whole_item()["id"], "output_index": 0}
        return place if self._reply.tool_call is not None else place | {"content_index": 0}

    def _whole_item(self) -> dict[str, Any]:
        suffix = self._head.id.removeprefix("resp_")
        call = self._reply.tool_call
        if call is not None:
            namespace, name = _split(call.name, self._asked.echo["tools"])
            return {
                "arguments": self._reply.arguments(),
                "call_id": call.id,
                "name": name,
                "type": "function_call",
                "id": f"fc_{suffix}",
                "namespace": namespace,
                "status": "completed",
            }
        part: dict[str, Any] = {
            "annotations": [],
            "text": self._reply.text(),
            "type": "output_text",
            "logprobs": None,
        }
        return {
            "id": f"msg_{suffix}",
            "content": [part],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": self._head.id,
            "created_at": self._head.created,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._head.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "background": False,
            **self._asked.echo,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": usage_fields(usage) if usage is not None else None,
            "user": None,
        }


_BEGUN: Final = ("created", "in_progress")


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Shape a usage."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_created_tokens or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
