from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.api.answers import Begun, Opening, opening_of


def event(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def finished(reason: str, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def message_delta(reason: str | None) -> bytes:
    return event({"type": "message_delta", "delta": {"stop_reason": reason}})


def completed(status: str, num_tokens: int) -> bytes:
    response = {"status": status, "usage": {"output_tokens": num_tokens}}
    return event({"type": "response.completed", "response": response})


ROLE = chunk(role="assistant", content="")
CREATED = event({"type": "response.created", "response": {"error": None}}, "response.created")
START = event({"type": "message_start", "message": {"content": []}}, "message_start")
FAILED = event({"error": {"message": "m", "type": "InternalServerError", "code": 500}})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        (b"", Begun.NOT_YET),
        (b": ping\n\n", Begun.NOT_YET),
        (ROLE, Begun.NOT_YET),
        (CREATED, Begun.NOT_YET),
        (START, Begun.NOT_YET),
        (event({"type": "ping"}, "ping"), Begun.NOT_YET),
        (event({"choices": [{"text": "", "finish_reason": None}]}), Begun.NOT_YET),
        (chunk(content="a")[:-1], Begun.NOT_YET),  # not whole
        (ROLE + chunk(content="a"), Begun.CONTENT),
        (ROLE + chunk(reasoning_content="a"), Begun.CONTENT),
        (ROLE + chunk(tool_calls=[{"index": 0}]), Begun.CONTENT),
        (event({"choices": [{"text": "a"}]}), Begun.CONTENT),
        (event({"choices": [{"text": "", "finish_reason": "stop"}]}), Begun.CONTENT),
        (ROLE + DONE, Begun.ENDED),
        (START + event({"type": "message_stop"}), Begun.ENDED),
        (ROLE + finished("abort"), Begun.ABORTED),
        (ROLE + finished("abort", content="a"), Begun.CONTENT),
        (ROLE + finished("stop"), Begun.CONTENT),
        (event({"choices": [{"token_ids": [1]}]}), Begun.CONTENT),
        (event({"choices": [{"token_ids": [], "finish_reason": "abort"}]}), Begun.ABORTED),
        (event({"choices": [{"finish_reason": "abort"}, {"text": "a"}]}), Begun.CONTENT),
        (START + message_delta(None), Begun.ABORTED),
        (START + message_delta("abort"), Begun.ABORTED),
        (START + message_delta("end_turn"), Begun.CONTENT),
        (CREATED + completed("completed", 0), Begun.ABORTED),
        (CREATED + completed("cancelled", 2), Begun.ABORTED),
        (CREATED + completed("completed", 1), Begun.CONTENT),
        (CREATED + event({"type": "response.completed"}), Begun.CONTENT),
        (START + event({"type": "content_block_start"}), Begun.CONTENT),
        (CREATED + event({"type": "response.output_item.added"}), Begun.CONTENT),
        (b"data: what is this\n\n", Begun.CONTENT),
        (b"data: [1]\n\n", Begun.CONTENT),
        (FAILED + DONE, 500),
        (ROLE + FAILED + DONE, 500),
        (ROLE.replace(b"\n", b"\r\n") + FAILED.replace(b"\n", b"\r\n"), 500),
        (ROLE + event({"error": {"message": "m", "code": 503}}), 503),
        (event({"error": {"message": "m", "type": "BadRequestError", "code": 400}}), 400),
        (event({"object": "error", "message": "m", "code": 400}), 400),
        (event({"type": "error", "error": {"type": "internal_error"}}, "error"), 500),
        (START + event({"type": "error", "error": {"type": "overloaded_error"}}, "error"), 503),
        (event({"type": "error", "error": {"type": "invalid_request_error"}}, "error"), 400),
        (CREATED + event({"type": "response.failed", "response": {"error": None}}), 500),
        (event({"type": "response.failed", "response": {"error": {"code": "server_error"}}}), 500),
        (event({"type": "error", "code": "rate_limit_exceeded", "message": "m"}), 429),
        (chunk(content="a") + FAILED, Begun.CONTENT),
    ],
)
def test_a_beginning_is_read_as_its_api_means_it(beginning: bytes, expected: Begun | int) -> None:
    """Generated output belongs to the client; an error before any output allows a retry."""
    assert opening_of(beginning) == expected


def test_a_beginning_that_grows_is_read_once() -> None:
    """Piece by piece it says the same as at once, wherever it is cut."""
    whole = CREATED + ROLE + chunk(content="a") + FAILED
    for step in (1, 7, 50):
        opening = Opening()
        kinds = [opening.read(whole[:end]) for end in range(0, len(whole) + step, step)]
        first = next(kind for kind in kinds if kind is not Begun.NOT_YET)

        assert first is Begun.CONTENT
        assert opening_of(whole) is Begun.CONTENT
