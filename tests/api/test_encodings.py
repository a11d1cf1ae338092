"""router.api.encodings: what a compressed body holds, within bounds."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from router.api.encodings import decoded
from router.base.errors import BadRequest, PayloadTooLarge, UnsupportedEncoding

BODY = b'{"messages":[]}' * 100
ZIPPED = gzip.compress(BODY, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", ZIPPED), ("x-gzip", ZIPPED), ("deflate", zlib.compress(BODY))],
    ids=["gzip", "x-gzip", "deflate"],
)
def test_it_reads_as_without(encoding: str, body: bytes) -> None:
    """Decompressing gives the bytes that were compressed."""
    assert decoded(body, encoding, 1 << 20) == BODY


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip,br", "", "é" * 99])
def test_other_encodings_are_refused(encoding: str) -> None:
    """An engine would take the compressed bytes for the body itself."""
    with pytest.raises(UnsupportedEncoding, match="send gzip, x-gzip, deflate or none"):
        decoded(b'{"priority":1}', encoding, 1 << 20)


WRONG = {
    "plain": b'{"priority":1}',
    "a byte": b"x",
    "gzip, cut": ZIPPED[:-9],
    "gzip and more": ZIPPED + b"more",
    "zlib and more": zlib.compress(BODY) + b"{}",
    "deflate, bare": zlib.compress(BODY, wbits=-15),
    "plain, like zlib": b"8" + BODY,
}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_not_as_it_says_is_refused(encoding: str, body: bytes) -> None:
    """A body that is not in the encoding it names gets a 400."""
    with pytest.raises(BadRequest, match="Content-Encoding"):
        decoded(body, encoding, 1 << 20)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """By its ratio or its size, whichever is less; no more than that is ever in memory."""
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()

    with pytest.raises(PayloadTooLarge, match=r"limits\.body_bytes"):
        decoded(bomb, "gzip", 8 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
    with pytest.raises(PayloadTooLarge, match="200 times"):
        decoded(gzip.compress(bytes(2 << 20)), "gzip", 1 << 30)
