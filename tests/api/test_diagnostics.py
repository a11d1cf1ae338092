"""router.api.diagnostics: what clients ask, and the APIs' own values for what was found."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.diagnostics import (
    NOT_FOUND,
    Comparison,
    Difference,
    Question,
    message_diagnostics,
    question_in,
    response_diagnostics,
)

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "question"),
    [
        (MESSAGES, {"diagnostics": {"previous_message_id": "m1"}}, Question("m1")),
        (MESSAGES, {"diagnostics": {"previous_message_id": None}}, Question()),
        (MESSAGES, {"diagnostics": {}}, Question()),
        (MESSAGES, {}, None),
        (MESSAGES, {"diagnostics": None}, None),
        (MESSAGES, {"diagnostics": "m1"}, None),
        (MESSAGES, {"diagnostics": ["previous_message_id"]}, None),
        (MESSAGES, {"diagnostics": {"previous_message_id": 1}}, None),
        (MESSAGES, {"prompt_cache_options": {"comparison_response_id": "r1"}}, None),
        (RESPONSES, {"prompt_cache_options": {"comparison_response_id": "r1"}}, Question("r1")),
        (RESPONSES, {"prompt_cache_options": {"mode": "explicit"}}, Question()),
        (RESPONSES, {"diagnostics": {"previous_message_id": "m1"}}, None),
        ("/v1/chat/completions", {"diagnostics": {"previous_message_id": "m1"}}, None),
    ],
)
def test_questions(path: str, body: dict[str, Any], question: Question | None) -> None:
    """Garbage is no question: engines ignore it, too."""
    assert question_in(path, body) == question


@pytest.mark.parametrize(
    ("difference", "of_message", "of_response"),
    [
        ("tools", "tools_changed", "tools_changed"),
        ("tool_order", "tools_changed", "tools_changed"),
        ("system", "system_changed", "input_changed"),
        ("message", "messages_changed", "input_changed"),
        ("compacted", "messages_changed", "context_compacted"),
        ("model", "model_changed", "model_changed"),
        ("salt", "unavailable", None),
        ("template", "unavailable", None),
        ("text", "unavailable", None),
        ("unknown", "unavailable", None),
    ],
)
def test_values(difference: Difference, of_message: str, of_response: str | None) -> None:
    found = Comparison(difference=difference, num_common=32, num_missed=100)
    missed = {} if of_message == "unavailable" else {"cache_missed_input_tokens": 100}
    answer: dict[str, Any] = {"type": "unavailable"}
    if of_response is not None:
        answer = {
            "type": "cache_miss",
            "reason": of_response,
            "cache_missed_tokens": 100,
            "comparison_reusable_tokens": 32,
        }

    assert message_diagnostics(found) == {"cache_miss_reason": {"type": of_message, **missed}}
    assert response_diagnostics(found, is_reused=False) == answer


def test_nothing_differs() -> None:
    same = Comparison(num_common=32)

    assert message_diagnostics(None) is None
    assert message_diagnostics(same) is None
    assert response_diagnostics(same, is_reused=True) == {"type": "cache_hit"}
    assert response_diagnostics(same, is_reused=False) == {"type": "unavailable"}


def test_the_answer_before_is_not_known() -> None:
    not_found = {"cache_miss_reason": {"type": "previous_message_not_found"}}

    assert message_diagnostics(NOT_FOUND) == not_found
    assert response_diagnostics(NOT_FOUND, is_reused=True) == {
        "type": "comparison_response_not_found"
    }
