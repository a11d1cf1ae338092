"""What an engine reports about a finished request, read from the bytes that pass through.

Nothing is added to a request to get it: a stream whose client did not ask for usage has none.

What an engine reports about a finished request of the Responses API.

A stream has it in its last event alone, which repeats the whole response; `usage` comes near the
end of it. Source: vLLM 0.32.0, entrypoints/openai/responses/protocol.py (ResponseUsage).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

TAIL_BYTES = 16 * 1024
"""How much of a stream's end is kept: vLLM sends usage in the last event before `[DONE]`."""


NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What bytes that are no JSON make msgspec raise; the last for brackets without end."""


class PromptDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(Struct, frozen=True):
    """`cached_tokens` is None where the engine runs without --enable-prompt-tokens-details."""

    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Count the prompt tokens the engine took from a cache; None: not reported."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _WithUsage(Struct):
    usage: Usage | None = None


_decoder = msgspec.json.Decoder(_WithUsage)


def usage_of_body(body: bytes) -> Usage | None:
    """Read the usage of a non-streaming answer; None: there is none, or it is not JSON."""
    try:
        return _decoder.decode(body).usage
    except NOT_JSON:
        return None


def usage_of_stream(
    tail: bytes, read: Callable[[bytes], Usage | None] = usage_of_body
) -> Usage | None:
    """Read the usage from the end of an event stream (its last `TAIL_BYTES` or more).

    Args:
        read: Reads that of one event's data.
    """
    end = len(tail)
    while (found := tail.rfind(b'"usage"', 0, end)) >= 0:
        start = tail.rfind(b"\n", 0, found) + 1
        line = tail[start : _line_end(tail, found)]
        if line.startswith(b"data:"):
            usage = read(line[5:].strip())
            if usage is not None:
                return usage
        end = start
    return None


def _line_end(tail: bytes, position: int) -> int:
    end = tail.find(b"\n", position)
    return end if end >= 0 else len(tail)


_KEY: Final = b'"usage":'
_LONGEST: Final = 4096  # bytes of a usage


class _ResponseUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: PromptDetails | None = None


class _ResponseBody(Struct, frozen=True):
    usage: _ResponseUsage | None = None


_response_decoder = msgspec.json.Decoder(_ResponseBody)
_decode_value = json.JSONDecoder().raw_decode


def usage_of_response(body: bytes) -> Usage | None:
    """Read the usage of a whole answer; None: there is none, or it is not JSON."""
    try:
        return _usage(_response_decoder.decode(body).usage)
    except NOT_JSON:
        return None


def usage_of_responses(tail: bytes) -> Usage | None:
    """Read the usage from the end of an event stream, whose last event may begin before it."""
    end = len(tail)
    while (found := tail.rfind(_KEY, 0, end)) >= 0:
        start = found + len(_KEY)
        text = tail[start : start + _LONGEST].decode(errors="replace").lstrip()
        try:
            value, _ = _decode_value(text)
            usage = _usage(msgspec.convert(value, _ResponseUsage | None))
        except (ValueError, RecursionError):  # of a tool's parameters, for instance
            usage = None
        if usage is not None:
            return usage
        end = found
    return None


def _usage(usage: _ResponseUsage | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        prompt_tokens_details=usage.input_tokens_details,
    )
