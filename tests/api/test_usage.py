"""router.api.answers: what an engine reports, read from bytes that only pass through.

What an engine reports of a response: whole, or in the last event of a stream.
"""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answers import (
    TAIL_BYTES,
    Usage,
    usage_of_body,
    usage_of_response,
    usage_of_responses,
    usage_of_stream,
)

BODY = (
    b'{"id":"x","choices":[],"usage":{"prompt_tokens":10,"total_tokens":12,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}'
)


def test_a_body_tells_its_usage() -> None:
    """Cached tokens are read where the engine reports them."""
    usage = usage_of_body(BODY)

    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.num_cached_tokens) == (10, 2, 8)


def test_an_engine_without_details_reports_no_cached_tokens() -> None:
    """Unknown is None, which differs from 0."""
    usage = usage_of_body(b'{"usage":{"prompt_tokens":10,"prompt_tokens_details":null}}')

    assert usage == Usage(prompt_tokens=10)
    assert usage.num_cached_tokens is None


def test_a_stream_tells_its_usage_in_its_last_events() -> None:
    """The last event that has one counts; `[DONE]` and nulls do not."""
    stream = (
        b'data: {"choices":[{}],"usage":null}\n\n'
        b"data: " + BODY + b'\n\ndata: {"usage":null}\n\ndata: [DONE]\n\n'
    )

    usage = usage_of_stream(stream)

    assert usage is not None
    assert usage.num_cached_tokens == 8


def test_a_cut_or_foreign_body_has_no_usage() -> None:
    """The result is None."""
    assert usage_of_body(BODY[:-9]) is None
    assert usage_of_body(b"<html>") is None
    assert usage_of_body(b'{"usage": "\xff"}') is None
    assert usage_of_body(b'{"x":' + b"[" * 100_000) is None
    assert usage_of_stream(b'a"usage": {"prompt_tokens": 3}}\n\ndata: [DONE]') is None
    assert usage_of_stream(b"") is None


USAGE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 96, "cache_write_tokens": 0},
    "output_tokens": 7,
    "total_tokens": 107,
}
TOOL = {"name": "f", "parameters": {"properties": {"usage": {"type": "string"}}}}
RESPONSE = {
    "id": "resp_1",
    "instructions": 'say "usage":{"input_tokens":1}' + "x" * 40_000,
    "tools": [TOOL],
    "usage": USAGE,
    "user": None,
}


def test_a_whole_answer_has_it_inside() -> None:
    """Tokens of the prompt, of these cached, and of the answer."""
    usage = usage_of_response(orjson.dumps(RESPONSE))

    assert usage is not None
    assert (usage.prompt_tokens, usage.num_cached_tokens, usage.completion_tokens) == (100, 96, 7)
    assert usage_of_response(b'{"usage": null}') is None
    assert usage_of_response(b"no json") is None


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_a_streams_last_event_has_it_near_its_end(kind: str) -> None:
    """However long the event is; a tool's parameter of that name is none."""
    event = {"response": RESPONSE, "sequence_number": 9, "type": kind}
    stream = f"event: {kind}\ndata: ".encode() + orjson.dumps(event) + b"\n\n"
    usage = usage_of_responses(stream[-TAIL_BYTES:])

    assert usage is not None
    assert (usage.prompt_tokens, usage.num_cached_tokens) == (100, 96)


def test_a_stream_without_it_has_none() -> None:
    """The first events say `"usage":null`; text that looks like one is escaped."""
    begun = orjson.dumps({"response": RESPONSE | {"usage": None}, "type": "response.created"})
    text = orjson.dumps({"delta": '"usage":{"input_tokens":1}'})

    assert usage_of_responses(b"data: " + begun + b"\n\ndata: " + text + b"\n\n") is None


@given(st.binary(max_size=60))
def test_no_bytes_are_an_error(noise: bytes) -> None:
    """No bytes whatsoever make it raise."""
    assert usage_of_response(noise) is None
    assert usage_of_responses(b'"usage":' + noise) is None
