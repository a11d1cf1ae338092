"""Bodies that clients compressed, as they would read without: only for us to look at.

vLLM 0.32 does not look at Content-Encoding: it takes a body for JSON as it is. So what an engine
could read must not hide behind an encoding that only we undo: a body is what its encoding says,
or it is refused. (gzip and zlib begin with bytes that no JSON object begins with.)
"""

from __future__ import annotations

import zlib
from typing import Final

from msgspec import Struct

from router.errors import BadRequest, PayloadTooLarge, UnsupportedEncoding

_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}
_MAX_RATIO: Final = 200  # JSON of agents: 5 to 20
_SMALL_BYTES: Final = 1 << 20  # of any ratio


class AsSent(Struct, frozen=True):
    """A compressed body as it came, and as it reads."""

    body: bytes
    view: bytes


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


def _wrong(encoding: str) -> BadRequest:
    return BadRequest(f"the body is not {encoding}, as its Content-Encoding says, or breaks off")
