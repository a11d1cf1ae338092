"""Which requests are the same request, sent again."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.api.body_digest import LARGE_BYTES, body_digest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}


def digest(body: Any, content_type: str = "application/json", **whose: str) -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    where = {"path": "/v1/chat/completions", "owner": ""} | whose
    return body_digest(raw, content_type, **where)


@pytest.mark.parametrize(
    "again",
    [
        CHAT,
        dict(reversed(CHAT.items())),
        orjson.dumps(CHAT, option=orjson.OPT_INDENT_2),
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        CHAT | {"metadata": {"user_id": "1"}, "user": "me", "max_tokens": 7},
    ],
)
def test_what_is_written_anew_is_the_same(again: Any) -> None:
    assert digest(again) == digest(CHAT)


@pytest.mark.parametrize(
    "other",
    [
        CHAT | {"model": "large"},
        CHAT | {"temperature": 0.6},
        CHAT | {"response_format": {"type": "json_object"}},
        CHAT | {"messages": [{"role": "user", "content": "hello!"}]},
        b"no JSON",
        b"[]",
    ],
)
def test_what_computes_something_else_is_another(other: Any) -> None:
    assert digest(other) != digest(CHAT)


def test_another_tenants_and_another_routes_request_is_another() -> None:
    assert digest(CHAT, owner="a") != digest(CHAT, owner="b")
    assert digest(CHAT, path="/v1/completions") != digest(CHAT)


def test_claude_codes_billing_header_does_not_count() -> None:
    def asked(billing: str) -> Any:
        blocks = [f"x-anthropic-billing-header: cch={billing}", "You are an agent."]
        return CHAT | {"system": [{"type": "text", "text": text} for text in blocks]}

    assert digest(asked("a")) == digest(asked("b"))
    assert digest(asked("a")) != digest(CHAT)


def test_a_forms_boundary_does_not_count() -> None:
    def form(boundary: str, text: str) -> bytes:
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="file"\r\n\r\n{text}\r\n'
        return digest(
            (body + f"--{boundary}--\r\n").encode(), f"multipart/form-data; boundary={boundary}"
        )

    assert form("abc", "sound") == form("0123456789", "sound")
    assert form("abc", "sound") != form("abc", "other")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b"x" * LARGE_BYTES + b'"}',
        b"[" * 5000,
        b'{"a": 123456789012345678901234567890}',
        b'{"a": "\\ud800"}',
        b"\xff\x00",
    ],
)
def test_any_bytes_have_a_digest(body: bytes) -> None:
    assert digest(body) == digest(body) != digest(body + b"x")
