"""What an engine reports about a finished request of the Responses API.

A stream has it in its last event alone, which repeats the whole response; `usage` comes near the
end of it. Source: vLLM 0.32.0, entrypoints/openai/responses/protocol.py (ResponseUsage).
"""

from __future__ import annotations

import json
from typing import Final

import msgspec
from msgspec import Struct

from router.api.usage import NOT_JSON, PromptDetails, Usage

_KEY: Final = b'"usage":'
_LONGEST: Final = 4096  # bytes of a usage


class _ResponseUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int | None = None
    input_tokens_details: PromptDetails | None = None


class _ResponseBody(Struct, frozen=True):
    usage: _ResponseUsage | None = None


_decoder = msgspec.json.Decoder(_ResponseBody)
_decode_value = json.JSONDecoder().raw_decode


def usage_of_response(body: bytes) -> Usage | None:
    """Read the usage of a whole answer; None: there is none, or it is not JSON."""
    try:
        return _usage(_decoder.decode(body).usage)
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
