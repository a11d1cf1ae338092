"""router.tenants.keys and salts: what is made, and that nothing reaches another tenant's."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from router.base.errors import BadRequest
from router.tenants.keys import DIGEST, digest_of, key_in, new_key, written
from router.tenants.salts import FORBIDDEN, MAX_CHARS, tenant_salt, user_salt

SECRET = "0123456789abcdef" * 4


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


def test_salts_of_tenants_differ_and_suit_the_engine() -> None:
    """By name and by secret; short enough, and of characters vLLM takes."""
    salts = {
        tenant_salt(secret, cache)
        for secret in (SECRET, SECRET[::-1])
        for cache in ("tenant/a", "tenant/b", "group/a")
    }

    assert len(salts) == 6
    assert all(len(salt) <= MAX_CHARS and not FORBIDDEN & set(salt) for salt in salts)


def test_a_client_cannot_reach_another_salt() -> None:
    """Whatever it sends is hashed under its tenant's salt: not even the other's salt works."""
    a, b = tenant_salt(SECRET, "tenant/a"), tenant_salt(SECRET, "tenant/b")

    made = {user_salt(tenant, sent) for tenant in (a, b) for sent in ("x", a, b, "user")}

    assert len(made | {a, b}) == 10


@pytest.mark.parametrize("sent", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5, True, [], {}])
def test_what_the_engine_would_refuse_is_refused(sent: object) -> None:
    """Combined, it would look like any other to the engine."""
    with pytest.raises(BadRequest, match="cache_salt"):
        user_salt("salt", sent)
