"""Why a body is no JSON that is read here, in words for its client.

The decoders' own messages tell where; they never quote the body.
"""

from __future__ import annotations

from typing import Final

# Source: orjson 3.10 to 3.13 and msgspec 0.22; the first that a message contains goes.
_REASONS: Final = (
    ("depth", "the body is nested deeper than 1,024"),
    ("recursion", "the body is nested deeper than 1,024"),
    ("not valid UTF-8", "the body is not valid UTF-8"),
    ("utf-8' codec", "the body is not valid UTF-8"),
    ("surrogate", "a string in the body has half of a surrogate pair, which is no character"),
    ("control character", "a string in the body has a control character that is not escaped"),
    ("unexpected content after", "the body goes on after its JSON object"),
    ("trailing characters", "the body goes on after its JSON object"),
    ("end of data", "the body ends before its JSON does"),
    ("truncated", "the body ends before its JSON does"),
)


_MAYBE_NAN: Final = ("expected a JSON value", "unexpected character", "no digit after")


def why_not_json(reason: str) -> str:
    """Word what a JSON decoder objected to.

    Args:
        reason: Its message.
    """
    for part, words in _REASONS:
        if part in reason:
            return f"{words}: {reason}"
    if any(part in reason for part in _MAYBE_NAN):
        return f"the body is not JSON (which has no NaN and no Infinity): {reason}"
    return f"the body is not JSON: {reason}"
