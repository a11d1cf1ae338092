"""Fuzz: whatever an engine sends, its usage is read or there is none; errors can always be read."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from loadtest.dev.chaos.answers import read_stream, read_whole
from router.api.answers import TAIL_BYTES, error_body, error_event, usage_of_body, usage_of_stream
from router.base.errors import BadRequest, RouterError, UpstreamBroken
from tests.fuzz.damage import FIXED, mutated
from tests.fuzz.values import is_sane

EVENT = (
    b'data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":'
    b'{"content":"a"},"finish_reason":null}]}\n\n'
)
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)
STREAM = EVENT + b"data: " + USAGE + b"\n\ndata: [DONE]\n\n"
SAMPLES = (USAGE, STREAM, EVENT * 3 + STREAM, STREAM.replace(b"\n", b"\r\n"))
PATHS = st.sampled_from(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/x")) | st.text()


@FIXED
@given(mutated(SAMPLES) | st.binary(max_size=200))
def test_any_bytes_have_a_usage_or_none(data: bytes) -> None:
    """Of a whole answer and of a stream's end."""
    assert is_sane(usage_of_body(data))
    assert is_sane(usage_of_stream(data))


@FIXED
@given(st.lists(mutated((EVENT,)), max_size=6), st.sampled_from((b"\n\n", b"\r\n\r\n")))
def test_usage_is_found_behind_anything(before: list[bytes], end: bytes) -> None:
    """What came before the last event does not hide it, however long it was."""
    stream = b"".join(before) + b"\n\n" + b"data: " + USAGE + end + b"data: [DONE]" + end

    usage = usage_of_stream(stream[-TAIL_BYTES:])

    assert usage is not None
    assert (usage.prompt_tokens, usage.num_cached_tokens) == (7, 4)


@FIXED
@given(st.text(), st.none() | st.text(), PATHS)
def test_an_error_has_its_apis_shape(message: str, param: str | None, path: str) -> None:
    """Whatever its message quotes, and also as the end of a stream that broke anywhere."""
    error: RouterError
    for error in (BadRequest(message, param=param), UpstreamBroken("r1", message)):
        assert read_whole(error_body(error, path)).fault is None

        event = error_event(error, path)
        for cut in (0, 1, len(EVENT) // 2, len(EVENT) - 1, len(EVENT)):
            read = read_stream(EVENT + EVENT[:cut] + event)
            assert read.error is not None
            assert read.error["error"]["message"] == message
            assert read.fault is None
    assert orjson.loads(error_body(BadRequest(message), path))
