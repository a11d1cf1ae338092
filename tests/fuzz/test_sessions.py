"""Fuzz: whatever a client says of its session, it is one, or none, and never fails the request."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.api.sessions import session_hash, session_of
from router.config import SessionConfig
from tests.fuzz.damage import FIXED

# As aiohttp reads a header: bytes that are no UTF-8 become lone surrogates.
HEADER = st.binary(max_size=600).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
TEXT = st.text(max_size=20) | st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=600)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = SessionConfig().headers
FIELDS = ("prompt_cache_key", "previous_response_id", "metadata", "user_id")


@FIXED
@given(
    st.dictionaries(st.sampled_from(NAMES), HEADER | TEXT, max_size=3),
    st.none() | st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    TEXT,
)
def test_any_session_can_be_hashed(
    headers: dict[str, str], body: dict[str, Any] | None, model: str
) -> None:
    """Sixty-three bits, the same for the same id."""
    session = session_of(headers, body, NAMES)

    if session is not None:
        assert session
        assert 0 <= session_hash(session, model) < 1 << 63
        assert session_hash(session, model) == session_hash(session, model)
