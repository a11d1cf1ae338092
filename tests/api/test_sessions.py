"""router.api.sessions: where a request says which conversation it belongs to."""

from __future__ import annotations

import pytest

from router.api.sessions import session_hash, session_of

NAMES = ("x-session-id", "session_id")


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        ({"x-session-id": "a", "session_id": "b"}, {"prompt_cache_key": "c"}, "a"),
        ({"session_id": "b"}, {"prompt_cache_key": "c"}, "b"),
        ({}, {"prompt_cache_key": "c", "metadata": {"user_id": "d"}}, "c"),
        ({}, {"previous_response_id": "resp_1"}, "resp_1"),
        ({}, {"metadata": {"user_id": "d"}}, "d"),
        ({}, {"metadata": {"user_id": 7}}, None),
        ({}, {"metadata": "x", "prompt_cache_key": ""}, None),
        ({"x-session-id": "x" * 513}, None, None),
        ({}, None, None),
    ],
)
def test_the_first_that_speaks_wins(
    headers: dict[str, str], body: dict[str, object] | None, found: str | None
) -> None:
    """Configured headers in order, then the body's own fields; nonsense is no session."""
    assert session_of(headers, body, NAMES) == found


def test_a_session_belongs_to_its_model() -> None:
    """The digest differs by model, is stable, and fits a signed 64-bit integer."""
    assert session_hash("s", "a") == session_hash("s", "a") != session_hash("s", "b")
    assert 0 <= session_hash("s", "a") < 1 << 63
