"""Bodies that clients compressed, as they would read without: only for us to look at.

vLLM 0.32 does not look at Content-Encoding: it takes a body for JSON as it is. So what an engine
could read must not hide behind an encoding that only we undo: a body is what its encoding says,
or it is refused. (gzip and zlib begin with bytes that no JSON object begins with.)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from router.base.errors import BadRequest, PayloadTooLarge, UnsupportedEncoding

_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}
_MAX_RATIO: Final = 200  # JSON of agents: 5 to 20
_SMALL_BYTES: Final = 1 << 20  # of any ratio


class AsSent(Struct, frozen=True):
    """A body as it came, and as it reads: without its compression, in UTF-8."""

    body: bytes
    view: bytes


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Return whether an answer's body is compressed; `headers` are found by any spelling."""
    return headers.get("Content-Encoding", "").strip().lower() not in ("", "identity")


def decoded(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress a body, to at most `limit_bytes` and 200 times its size.

    Raises:
        UnsupportedEncoding, PayloadTooLarge, BadRequest: none of ours; too large; not as it says.
    """
    window = _WINDOWS.get(encoding)
    if window is None:
        raise UnsupportedEncoding(
            f"Content-Encoding {encoding[:40]!a} is not known here; send {', '.join(_WINDOWS)} or "
            "none",
            param="Content-Encoding",
        )
    limit = min(limit_bytes, max(_SMALL_BYTES, _MAX_RATIO * len(body)))
    reader = zlib.decompressobj(window)
    try:
        view = reader.decompress(body, limit + 1)
    except zlib.error as exc:
        raise _wrong(encoding) from exc
    if len(view) > limit:
        raise PayloadTooLarge(
            f"decompressed, the body is larger than {limit} bytes (limits.body_bytes, or "
            f"{_MAX_RATIO} times what was sent)"
        )
    if not reader.eof or reader.unused_data:
        raise _wrong(encoding)
    return view


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


def _wrong(encoding: str) -> BadRequest:
    return BadRequest(f"the body is not {encoding}, as its Content-Encoding says, or breaks off")
