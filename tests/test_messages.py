"""What routers send one another survives the way through Redis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.contracts import HashContract
from router.base.messages import (
    StreamId,
    StreamStatus,
    decode_status,
    encode,
    pack_keys,
    unpack_keys,
)

X = StreamId("r1#0")
STATUS = StreamStatus("exact", "", HashContract(algorithm="sha256", block_size=16), 1200)


@given(st.lists(st.integers(0, 2**60 - 1)))
def test_keys_come_back_as_they_were_packed(keys: list[int]) -> None:
    """Eight bytes a key, in order."""
    packed = pack_keys(keys)

    assert len(packed) == 8 * len(keys)
    assert unpack_keys(packed) == keys


def test_half_a_key_is_refused() -> None:
    """A torn entry is not read as other keys."""
    with pytest.raises(ValueError, match="multiple"):
        unpack_keys(b"12345")


def test_a_status_comes_back() -> None:
    """Contract included."""
    assert decode_status(encode(STATUS)) == STATUS


def test_garbage_is_refused() -> None:
    """Bytes that are something else raise what the reader counts."""
    with pytest.raises(ValueError, match="not decodable"):
        decode_status(b"\xc1garbage")
