"""router.api.usage: what an engine reports, read from bytes that only pass through."""

from __future__ import annotations

from router.api.usage import Usage, usage_of_body, usage_of_stream

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
