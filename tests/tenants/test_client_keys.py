"""router.tenants.client_keys: what is made, and what is found."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from router.tenants.client_keys import DIGEST, digest_of, key_in, new_key, written


def test_a_key_has_256_random_bits() -> None:
    """Two are never alike; the digest is written as the file wants it."""
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(len(key) == len("wr-") + 43 for key in keys)
    assert DIGEST.fullmatch(written(digest_of(keys.pop())))


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer abc"}, "abc"),
        ({"Authorization": "bearer  abc "}, "abc"),
        ({"X-API-Key": "abc"}, "abc"),
        ({"Authorization": "Basic abc", "x-api-key": "def"}, "def"),
        ({"Authorization": "Bearer ", "x-api-key": "def"}, "def"),
        ({"Authorization": "abc"}, None),
        ({"Authorization": "Bearer " + "x" * 513}, None),
        ({}, None),
    ],
)
def test_where_a_key_is_found(headers: dict[str, str], key: str | None) -> None:
    """A bearer token first, then Anthropic's header; nothing else is a key."""
    assert key_in(CIMultiDict(headers)) == key


def test_odd_bytes_in_a_key_are_digested() -> None:
    """aiohttp hands them out as lone surrogates; nothing breaks."""
    assert len(digest_of("\udcff\udc80")) == 32
