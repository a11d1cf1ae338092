from __future__ import annotations

from typing import Any

import pytest

from router.api.routes import has_side_effects


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/v1/chat/completions", {"model": "m"}, False),
        ("POST", "/v1/chat/completions/", {"model": "m"}, False),
        ("POST", "/v1/audio/transcriptions", None, False),
        ("GET", "/v1/files", None, False),
        ("POST", "/v1/responses", {"model": "m"}, False),
        ("POST", "/v1/responses", {"background": True}, True),
        ("POST", "/v1/responses", {"store": True}, True),
        ("POST", "/v1/responses/r1/cancel", None, True),
        ("POST", "/v1/files", None, True),
        ("POST", "/v1/load_lora_adapter", {}, True),
        ("DELETE", "/v1/chat/completions", None, True),
    ],
)
def test_what_may_change_something_is_known(
    method: str, path: str, body: dict[str, Any] | None, expected: bool
) -> None:
    """Only requests that compute an answer and keep nothing may be sent twice."""
    assert has_side_effects(method, path, body) is expected
