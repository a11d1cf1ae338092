"""Why a body is no JSON that is read here, in words for its client.

The decoders' own messages tell where; they never quote the body.

Bodies in other encodings than plain UTF-8.

vLLM 0.32 does not look at Content-Encoding: it takes a body for JSON as it is. So a compressed body
of a request is refused here. An answer that is compressed, by a proxy in front of an engine, passes
unread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from router.base.errors import BadRequest

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


class AsSent(Struct, frozen=True):
    """A body as it came, and as it reads in UTF-8."""

    body: bytes
    view: bytes


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Return whether a body is compressed; `headers` are found by any spelling."""
    return headers.get("Content-Encoding", "").strip().lower() not in ("", "identity")


def utf8(body: bytes) -> bytes:
    """Return JSON as UTF-8 without a byte order mark: `body` itself, if it is that already.

    vLLM 0.32 reads bodies with `json.loads`, which takes UTF-16 and UTF-32, too, and the mark.

    Raises:
        BadRequest: the bytes are not in the encoding that they seem to be in.
    """
    if body[:1] in _PLAIN_STARTS and 0 not in body[:4]:
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    try:
        return body.decode(encoding).encode()
    except UnicodeError as exc:
        raise BadRequest(f"the body looks like {encoding} and is not; send UTF-8") from exc


_PLAIN_STARTS: Final = frozenset(bytes([byte]) for byte in range(1, 128))
