"""What an engine reports about a finished request, read from the bytes that pass through.

Nothing is added to a request to get it: a stream whose client did not ask for usage has none.
"""

from __future__ import annotations

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
