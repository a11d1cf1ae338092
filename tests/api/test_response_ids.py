"""Ids of responses, in requests and in answers."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.response_ids import is_kept, issued_in, named_in


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses/resp_1", None, "resp_1"),
        ("/v1/responses/resp_1/cancel", None, "resp_1"),
        ("/v1/responses/resp_1/input_items", None, "resp_1"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/responses", {"previous_response_id": "no id\n"}, None),
        ("/v1/responses", {"previous_response_id": 5}, None),
        ("/v1/responses", {}, None),
        ("/v1/chat/completions", {"previous_response_id": "resp_1"}, None),
    ],
)
def test_a_request_names_a_response(path: str, body: Any, named: str | None) -> None:
    """In its path, or as the one that it goes on from."""
    assert named_in(path, body) == named


@pytest.mark.parametrize(
    ("beginning", "is_stream", "issued"),
    [
        (b'{"id":"resp_1","object":"response"}', False, "resp_1"),
        (b' { "id" : "resp_1"', False, "resp_1"),
        (b'{"error":{"id":"resp_1"}}', False, None),
        (b"", False, None),
        (
            b'event: response.created\ndata: {"response":{"id":"resp_1","tools":[]},"type":"res',
            True,
            "resp_1",
        ),
        (b'data: {"type":"error"}\n\n', True, None),
    ],
)
def test_an_answer_brings_an_id(beginning: bytes, is_stream: bool, issued: str | None) -> None:
    """At its head, whole or not."""
    assert issued_in(beginning, is_event_stream=is_stream) == issued


def test_what_an_engine_may_keep() -> None:
    """All but those with `store: false`, and those whose id the client chose."""
    assert is_kept({})
    assert is_kept({"store": None})
    assert not is_kept({"store": False})
    assert not is_kept({"request_id": "resp_mine"})
