"""The engine's HTTP shapes: requests in, answers, streams and errors out.

What must live here: field names, their order, messages of errors. What must not: sockets, state.
Source: answers of vLLM 0.32.0 to the same requests (field by field), vllm/entrypoints/openai.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import orjson
from msgspec import Struct
from msgspec.structs import replace

from loadtest.emulator.replies import Reply

VERSION: Final = "0.32.0"
FINGERPRINT: Final = f"vllm-{VERSION}-emulated"
DONE: Final = b"data: [DONE]\n\n"

Api = Literal["chat", "completion", "messages", "responses"]


class ApiError(Exception):
    """An answer that is an error, in vLLM's own JSON."""

    def __init__(
        self, status: int, message: str, *, type: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = orjson.dumps(
            {"error": {"message": message, "type": type, "param": param, "code": status}}
        )


def invalid_value(message: str, param: str, value: Any = None) -> ApiError:
    """Return the error of a value out of range, as vLLM's VLLMValidationError has it."""
    detail = f"parameter={param}" + ("" if value is None else f", value={value}")
    return ApiError(400, f"{message} ({detail})", param=param)


def invalid_type(kind: str, field: str, message: str, given: Any) -> ApiError:
    """Return the error of a missing or mistyped field, as the request models have it."""
    shown = f"<dict of {len(given)} items>" if isinstance(given, dict) else given
    detail = {"type": kind, "loc": f"body.{field}", "msg": message, "input": shown}
    return ApiError(
        400, f"1 validation error:\n  {detail}", type="Bad Request", param=f"body.{field}"
    )


def missing_fields(fields: list[str], body: Mapping[str, Any]) -> ApiError:
    """Return the error of a body that has none of several alternative fields."""
    details = [
        {
            "type": "missing",
            "loc": f"body.{field}",
            "msg": "Field required",
            "input": f"<dict of {len(body)} items>",
        }
        for field in fields
    ]
    lines = "\n".join(f"  {detail}" for detail in details)
    return ApiError(
        400,
        f"{len(fields)} validation errors:\n{lines}",
        type="Bad Request",
        param=f"body.{fields[0]}",
    )


def unknown_model(name: str, served: list[str]) -> ApiError:
    return ApiError(
        404,
        f"The model `{name}` does not exist. Valid aliases: {', '.join(served)}.",
        type="NotFoundError",
        param="model",
    )


def parse_body(raw: bytes, content_type: str) -> dict[str, Any]:
    """Decode a request body.

    Raises:
        ApiError: Not declared as JSON, not JSON, or no object.
    """
    if content_type.split(";", 1)[0].strip().lower() != "application/json":
        raise ApiError(
            400,
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            type="Bad Request",
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        detail = {
            "type": "json_invalid",
            "loc": f"body.{exc.pos}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": exc.msg},
        }
        raise ApiError(
            400,
            f"1 validation error:\n  {detail}",
            type="Bad Request",
            param=f"body.{exc.pos}",
        ) from exc
    if not isinstance(body, dict):
        raise ApiError(
            400,
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', "
            "'msg': 'Input should be a valid dictionary or object to extract fields from'}",
            type="Bad Request",
            param="body",
        )
    return body


class GenerationParams(Struct, frozen=True, kw_only=True):
    """What both generation APIs have in common."""

    max_tokens: int | None
    min_tokens: int
    n: int
    stop: tuple[str, ...]
    ignore_eos: bool
    seed: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str | None
    extension: Mapping[str, Any]  # the body's `emulator` object: reply_tokens, tool_call, echo


def parse_generation(body: Mapping[str, Any], api: Api) -> GenerationParams:
    """Check and read the fields that say how much to generate and how to send it.

    Raises:
        ApiError: As vLLM words it.
    """
    max_tokens = _integer(body, "max_tokens")
    if api != "completion":
        completion_tokens = _integer(body, "max_completion_tokens")
        max_tokens = max_tokens if completion_tokens is None else completion_tokens
    elif max_tokens is None:
        max_tokens = 16
    if max_tokens is not None and max_tokens < 1:
        raise invalid_value(
            f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens
        )
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise invalid_value(
            f"temperature must be non-negative, got {float(temperature)}.",
            "temperature",
            float(temperature),
        )
    stream = body.get("stream") is True
    options = body.get("stream_options") or {}
    if options and not stream:
        raise invalid_value(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    n = _integer(body, "n")
    n = 1 if n is None else n
    if n < 1:
        raise invalid_value(f"n must be at least 1, got {n}.", "n", n)
    if n > 1 and temperature == 0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")
    stop = body.get("stop") or ()
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise invalid_value(
            "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"
        )
    extension = body.get("emulator")
    return GenerationParams(
        max_tokens=max_tokens,
        min_tokens=_integer(body, "min_tokens") or 0,
        n=n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=body.get("ignore_eos") is True,
        seed=_integer(body, "seed"),
        stream=stream,
        include_usage=options.get("include_usage") is True,
        continuous_usage=options.get("continuous_usage_stats") is True,
        return_token_ids=body.get("return_token_ids") is True,
        cache_salt=salt,
        extension=extension if isinstance(extension, Mapping) else {},
    )


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise invalid_type(
        "int_parsing",
        name,
        "Input should be a valid integer, unable to parse string as an integer",
        value,
    )


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of one answer. `num_created_tokens` None: not reported (completions)."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_created_tokens: int | None

    def counts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens": self.num_completion_tokens,
        }

    def before_any(self) -> Self:
        """Return the usage with nothing generated yet."""
        return replace(self, num_completion_tokens=0)

    def full(self) -> dict[str, Any]:
        """Shape the usage of an answer that is not streamed."""
        return self.counts() | {
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached_tokens,
                "created_cache_tokens": self.num_created_tokens,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def last_chunk(self) -> dict[str, Any]:
        """Shape the usage of a stream's last chunk: without nulls."""
        details = {"cached_tokens": self.num_cached_tokens}
        if self.num_created_tokens is not None:
            details["created_cache_tokens"] = self.num_created_tokens
        return self.counts() | {"prompt_tokens_details": details}


class Head(Struct, frozen=True, kw_only=True):
    """What every chunk and answer of a request repeats."""

    id: str
    created: int
    model: str
    api: Api


def answer_id(request_id: str | None, api: Api) -> str:
    """Name an answer after its request's `X-Request-Id`, which the Responses route ignores."""
    if api == "responses":
        return f"resp_{uuid.uuid4().hex}"
    id = request_id or uuid.uuid4().hex[:16]
    return f"{'cmpl' if api == 'completion' else 'chatcmpl'}-{id}"


def answer(
    head: Head,
    replies: list[Reply],
    usage: Usage,
    *,
    prompt_ids: list[int] | None = None,
) -> bytes:
    """Build the whole answer; `prompt_ids` if token ids were asked for."""
    with_ids = prompt_ids is not None
    if head.api == "chat":
        choices = [_chat_choice(i, reply, with_ids) for i, reply in enumerate(replies)]
        tail = {
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "prompt_text": None,
        }
        kind = "chat.completion"
    else:
        choices = [_completion_choice(i, reply, prompt_ids) for i, reply in enumerate(replies)]
        tail = {}
        kind = "text_completion"
    return orjson.dumps(
        {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage.full(),
            **tail,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _chat_choice(index: int, reply: Reply, with_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text(),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if reply.tool_call is not None:
        call = reply.tool_call
        arguments = call.arguments[: reply.arguments_until(len(reply.ids))]
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
        ]
    message["reasoning"] = None
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "token_ids": reply.ids if with_ids else None,
        "routed_experts": None,
    }


def _completion_choice(index: int, reply: Reply, prompt_ids: list[int] | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": reply.text(),
        "logprobs": None,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "token_ids": None if prompt_ids is None else reply.ids,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
        "routed_experts": None,
    }


class ChunkWriter:
    """Writes one choice of a stream, chunk by chunk; bytes that repeat are built once."""

    __slots__ = ("_head", "_ids", "_is_last", "_named", "_num_arguments", "_open", "_reply")

    def __init__(
        self,
        head: Head,
        index: int,
        reply: Reply,
        *,
        return_token_ids: bool = False,
        usage_follows: bool = False,
    ) -> None:
        kind = "chat.completion.chunk" if head.api == "chat" else "text_completion"
        start = orjson.dumps(
            {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        )
        payload = b'"delta":' if head.api == "chat" else b'"text":'
        self._open = (
            b"data: " + start[:-1] + b',"choices":[{"index":%d,' % index + payload
        )  # the choice's opening, up to what changes
        self._head = head
        self._reply = reply
        self._is_last = not usage_follows
        self._ids = return_token_ids
        self._named = False
        self._num_arguments = 0

    def role(self, usage: Usage | None, prompt_ids: list[int] | None) -> bytes:
        """Open a chat choice; `usage` with continuous usage stats, with nothing generated yet."""
        return (
            self._open
            + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            + _continuous(usage, chat=True)
            + b',"prompt_token_ids":'
            + orjson.dumps(prompt_ids)
            + b',"prompt_text":null}\n\n'
        )

    def tokens(
        self, start: int, stop: int, usage: Usage | None, prompt_ids: list[int] | None = None
    ) -> bytes:
        """Write tokens [start, stop) of the reply, the end with the last of them.

        `prompt_ids` go with a completion's first chunk where they were asked for.
        """
        ends = stop == len(self._reply.ids)
        ids = self._reply.ids[start:stop]
        payloads = self._payloads(start, stop, ends)
        last = len(payloads) - 1
        return b"".join(
            self._chunk(payload, ids, ends and i == last, usage, prompt_ids)
            for i, payload in enumerate(payloads)
        )

    def _chunk(
        self,
        payload: bytes,
        ids: list[int],
        ends: bool,
        usage: Usage | None,
        prompt_ids: list[int] | None,
    ) -> bytes:
        chat = self._head.api == "chat"
        reason = b'"%b"' % self._reply.finish_reason.encode() if ends else b"null"
        chunk = self._open + payload + b',"logprobs":null,"finish_reason":' + reason
        if ends or not chat:
            stop_reason = self._reply.stop_reason if ends else None
            chunk += b',"stop_reason":' + orjson.dumps(stop_reason)
        if not chat:
            chunk += b',"prompt_token_ids":' + orjson.dumps(prompt_ids)
        token_ids = orjson.dumps(ids) if self._ids else b"null"
        chunk += b',"token_ids":' + token_ids + b"}]" + _continuous(usage, chat=chat)
        if ends and self._is_last:
            chunk += b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return chunk + b"}\n\n"

    def _payloads(self, start: int, stop: int, ends: bool) -> list[bytes]:
        """Build the deltas or the text of tokens [start, stop); none: nothing to send yet."""
        if self._head.api == "completion":
            return [orjson.dumps(self._reply.text(start, stop))]
        if self._reply.tool_call is None:
            return [b'{"content":' + orjson.dumps(self._reply.text(start, stop)) + b"}"]
        deltas = self._tool_deltas(stop)
        payloads = [orjson.dumps({"content": None, "tool_calls": [delta]}) for delta in deltas]
        return [*payloads, b"{}"] if ends else payloads

    def _tool_deltas(self, stop: int) -> list[dict[str, Any]]:
        """Write the call's name once its part is out, then its arguments as they grow."""
        call = self._reply.tool_call
        assert call is not None
        deltas: list[dict[str, Any]] = []
        if not self._named and stop >= call.start:
            self._named = True
            function = {"name": call.name}
            deltas.append({"id": call.id, "type": "function", "index": 0, "function": function})
        known = self._reply.arguments_until(stop)
        if known > self._num_arguments:
            arguments = call.arguments[self._num_arguments : known]
            deltas.append({"index": 0, "function": {"arguments": arguments}})
            self._num_arguments = known
        return deltas


def usage_chunk(head: Head, usage: Usage) -> bytes:
    """Build the chunk that `include_usage` asks for."""
    kind = "chat.completion.chunk" if head.api == "chat" else "text_completion"
    return (
        b"data: "
        + orjson.dumps(
            {
                "id": head.id,
                "object": kind,
                "created": head.created,
                "model": head.model,
                "choices": [],
                "usage": usage.last_chunk(),
                "system_fingerprint": FINGERPRINT,
            }
        )
        + b"\n\n"
    )


def _continuous(usage: Usage | None, *, chat: bool) -> bytes:
    if usage is None:
        return b""
    counts = usage.counts()
    if chat:
        counts["completion_tokens_details"] = None
    return b',"usage":' + orjson.dumps(counts)
