"""router.base.caller: no salt reaches another caller's cache."""

from __future__ import annotations

import pytest

from router.base.caller import FORBIDDEN, MAX_CHARS, cache_salt, user_salt
from router.base.errors import BadRequest

SECRET = "0123456789abcdef" * 4


def test_salts_of_callers_differ_and_suit_the_engine() -> None:
    """By name and by secret; short enough, and of characters vLLM takes."""
    salts = {
        cache_salt(secret, cache)
        for secret in (SECRET, SECRET[::-1])
        for cache in ("tenant/a", "tenant/b", "group/a")
    }

    assert len(salts) == 6
    assert all(len(salt) <= MAX_CHARS and not FORBIDDEN & set(salt) for salt in salts)


def test_a_client_cannot_reach_another_salt() -> None:
    """Whatever it sends is hashed under its caller's salt: not even the other's salt works."""
    a, b = cache_salt(SECRET, "tenant/a"), cache_salt(SECRET, "tenant/b")

    made = {user_salt(salt, sent) for salt in (a, b) for sent in ("x", a, b, "user")}

    assert len(made | {a, b}) == 10


@pytest.mark.parametrize("sent", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5, True, [], {}])
def test_what_the_engine_would_refuse_is_refused(sent: object) -> None:
    """Combined, it would look like any other to the engine."""
    with pytest.raises(BadRequest, match="cache_salt"):
        user_salt("salt", sent)
