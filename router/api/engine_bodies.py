"""The request that has a prompt computed and nothing else, made of a client's own.

All that decides the prompt stays as it is, so that both engines have the same tokens. What asks for
an answer goes: one token is generated, which is not read. It must not be the end of the answer: an
engine hands over KV only of a request that ended for its length. Messages have no field for that,
and Responses none for `min_tokens`, so `is_capped` looks at how it ended.

Source: vLLM 0.32.0, entrypoints/*/protocol.py; v1/core/sched/utils.py `check_stop`;
distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py `request_finished`.

The body for an engine's `/tokenize`, which makes the tokens of a prompt where we cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.body import with_fields, without_fields
from router.api.openai import ChatRequest, Json

_ONE: Final[Mapping[str, Any]] = {"stream": False, "ignore_eos": True}
_SET: Final[Mapping[str, Mapping[str, Any]]] = {
    "chat": {**_ONE, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
    "completions": {**_ONE, "max_tokens": 1, "min_tokens": 1},
    "messages": {"stream": False, "max_tokens": 1},
    "responses": {**_ONE, "max_output_tokens": 1, "store": False},
}
_STOPS: Final = ("stop", "stop_token_ids", "stream_options")
_MORE: Final = ("n", "best_of", "use_beam_search", "logprobs", "top_logprobs")
_DROP: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": (*_STOPS, *_MORE),
    "completions": (*_STOPS, *_MORE),
    "messages": ("stop_sequences",),
    "responses": (*_STOPS, "background", "top_logprobs"),
}

_PARAMS: Final = "kv_transfer_params"

NIXL_ASK: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Transfer parameters of a prompt that a NixlConnector hands over."""


class _Thinking(Struct):
    type: str = ""


class _ThinkingBody(Struct):
    thinking: _Thinking | None = None


class _EndedChoice(Struct):
    finish_reason: str | None = None


class _Ended(Struct):
    choices: list[_EndedChoice] = []  # chat, completions
    stop_reason: str | None = None  # messages
    status: str | None = None  # responses
    kv_transfer_params: dict[str, Any] | None = None


_decode_thinking = msgspec.json.Decoder(_ThinkingBody).decode
_decode_ended = msgspec.json.Decoder(_Ended).decode


def prefill_body(api: str, body: bytes, params: Mapping[str, Any] | None) -> bytes:
    """Make the request for a prompt.

    Args:
        api: Name of an API whose prompts are known.
        params: `kv_transfer_params` of the transfer; None: it has none.

    Raises:
        BadRequest: a field that has to change is there too often.
    """
    drop = _DROP[api]
    if api == "messages" and _has_thinking_budget(body):
        drop = (*drop, "thinking")
    values = dict(_SET[api])
    if params is not None:
        values[_PARAMS] = params
    return with_fields(without_fields(body, drop), values)


def decode_body(body: bytes, params: Mapping[str, Any]) -> bytes:
    """Add a transfer's parameters to a client's request.

    Raises:
        BadRequest: the field is there too often.
    """
    return with_fields(body, {_PARAMS: params})


def mooncake_ask(transfer_id: str) -> dict[str, Any]:
    """Return the transfer parameters of a prompt that a MooncakeConnector hands over."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }


def mooncake_read(bootstrap: str | None, engine_id: str, transfer_id: str) -> dict[str, Any]:
    """Return the transfer parameters of a request whose prompt another engine computes."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }


def is_capped(answer: bytes) -> bool:
    """Return whether a prompt's request ended for its length, as it has to."""
    try:
        ended = _decode_ended(answer)
    except msgspec.DecodeError:
        return False
    return (
        any(choice.finish_reason == "length" for choice in ended.choices)
        or ended.stop_reason == "max_tokens"
        or ended.status == "incomplete"
    )


def transfer_params(answer: bytes) -> dict[str, Any] | None:
    """Read the `kv_transfer_params` that an engine answers; None: there are none."""
    try:
        return _decode_ended(answer).kv_transfer_params
    except msgspec.DecodeError:
        return None


def _has_thinking_budget(body: bytes) -> bool:
    """Return whether a message may think for so many tokens: more than the one it gets.

    The budget is no part of the prompt (anthropic/serving.py `_handle_thinking`); `disabled` is.
    """
    if b"thinking" not in body and b"\\u" not in body:
        return False
    try:
        thinking = _decode_thinking(body).thinking
    except msgspec.DecodeError:
        return False
    return thinking is not None and thinking.type == "enabled"


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
