"""Fuzz: whatever a client says of its session, it is one, or none, and never fails the request."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.api.sessions import SessionHeaders, session_hash, session_of
from tests.fuzz.damage import FIXED

# As aiohttp reads a header: bytes that are no UTF-8 become lone surrogates.
HEADER = st.binary(max_size=600).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
TEXT = st.text(max_size=20) | st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=600)
KEYS = TEXT | st.sampled_from("role content text type image_url url session_id user_id".split())
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just("user") | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
READ = SessionHeaders()
NAMES = (*READ.names, *READ.late, *READ.parents)
AGENTS = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id", "x-codex-parent-thread-id")
FIELDS = (
    *("session_id", "prompt_cache_key", "previous_response_id", "metadata", "user", "user_id"),
    *("messages", "input", "prompt", "system", "instructions", "tools"),
)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/models")


@FIXED
@given(
    st.dictionaries(st.sampled_from((*NAMES, *AGENTS)), st.just("a") | HEADER | TEXT, max_size=4),
    st.none() | st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    TEXT,
    st.sampled_from(PATHS),
)
def test_any_session_can_be_hashed(
    headers: dict[str, str], body: dict[str, Any] | None, model: str, path: str
) -> None:
    """Sixty-three bits, the same for the same id."""
    session = session_of(headers, body, READ, path)

    if session is not None:
        assert session.name
        assert session == session_of(headers, body, READ, path)
        assert session.parent != session.name
        for name in (session.name, session.parent or ""):
            assert 0 <= session_hash(name, model) < 1 << 63
            assert session_hash(name, model) == session_hash(name, model)
