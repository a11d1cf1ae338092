"""router.api.answers: errors in each API's own JSON."""

from __future__ import annotations

import orjson

from router.api.answers import error_body, error_event, error_headers
from router.base.errors import BadRequest, NoReplicaAvailable, UpstreamBroken


def test_openai_routes_answer_as_vllm_does() -> None:
    """Message, type, param and the status as code."""
    error = orjson.loads(error_body(BadRequest("no", param="messages"), "/v1/chat/completions"))

    assert error == {
        "error": {"message": "no", "type": "BadRequestError", "param": "messages", "code": 400}
    }


def test_messages_answer_as_anthropic_does() -> None:
    """The type follows the status; unknown ones are api_error."""
    overloaded = orjson.loads(error_body(NoReplicaAvailable("busy"), "/v1/messages"))
    broken = orjson.loads(error_body(UpstreamBroken("r1", "gone"), "/v1/messages/count_tokens"))

    assert overloaded == {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert broken["error"]["type"] == "api_error"


def test_an_error_inside_a_stream_is_an_event_of_its_own() -> None:
    """A half-written event before it is ended first; there is no [DONE]."""
    event = error_event(UpstreamBroken("r1", "gone"), "/v1/chat/completions")

    assert event.startswith(b"\n\ndata: {")
    assert event.endswith(b"}\n\n")
    assert error_event(UpstreamBroken("r1", "gone"), "/v1/messages").startswith(b"\n\nevent: error")


def test_only_no_replica_says_when_to_come_back() -> None:
    """Retry-After is whole seconds, at least one."""
    assert error_headers(NoReplicaAvailable("x", retry_after_s=0.2)) == {"Retry-After": "1"}
    assert error_headers(NoReplicaAvailable("x", retry_after_s=7.6)) == {"Retry-After": "8"}
    assert error_headers(BadRequest("x")) == {}
