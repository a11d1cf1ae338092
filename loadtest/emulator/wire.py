"""The engine's HTTP shapes that all its routes share: requests, errors, usage.

Source: answers of vLLM 0.32.0 to the same requests (field by field), vllm/entrypoints/openai.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import orjson
from msgspec import Struct
from msgspec.structs import replace

VERSION: Final = "0.32.0"
FINGERPRINT: Final = f"vllm-{VERSION}-emulated"

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


def invalid_field(field: str, message: str) -> ApiError:
    """Return the error of a missing or mistyped field; '': the whole body."""
    place = f"body.{field}" if field else "body"
    text = f"1 validation error:\n  {place}: {message}"
    return ApiError(400, text, type="Bad Request", param=place)


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
        raise invalid_field("", "Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise invalid_field(str(exc.pos), f"JSON decode error: {exc.msg}") from exc
    if not isinstance(body, dict):
        raise invalid_field("", "Input should be a valid dictionary or object")
    return body


class GenerationParams(Struct, frozen=True, kw_only=True):
    """The fields that all generation APIs share."""

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
    """Check and read the fields of length and form of the reply.

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
        raise invalid_value("temperature must be non-negative.", "temperature", temperature)
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
    if value is None or type(value) is int:
        return value
    raise invalid_field(name, "Input should be a valid integer")


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
    """Fields that every chunk and answer of a request repeats."""

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
