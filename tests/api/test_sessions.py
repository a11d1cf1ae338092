"""router.api.sessions: the conversation that a request names."""

from __future__ import annotations

import re

import pytest

from router.api.sessions import session_hash, session_header, session_of

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
        ({"x-session-id": "x" * 20_000}, None, None),
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


@pytest.mark.parametrize(
    "session", ["a\r\nX-Evil: 1", "\udcff\udcfe", "\x00", "sité", " ", " a", "a\t", "x" * 10_000]
)
def test_an_odd_session_is_a_session(session: str) -> None:
    """It has a digest; and that, not the bytes, is what an engine gets."""
    assert session_of({"x-session-id": session}, None, NAMES) == session
    assert session_hash(session, "m") != session_hash("", "m")
    assert re.fullmatch("[0-9a-f]{16}", session_header(session))


@pytest.mark.parametrize("session", ["a", "user 7", "3b70e2b4-94a4", "x" * 512])
def test_a_plain_session_is_forwarded_as_it_is(session: str) -> None:
    """Engines name it in their events."""
    assert session_header(session) == session
