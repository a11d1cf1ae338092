"""What is read from a streamed answer: times, tokens, and what can be wrong with it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.results import Predicted
from loadtest.runner.exchange import Exchange, error_text

DONE = b"data: [DONE]\n\n"
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 64},
    },
}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}]}


def written(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


def started(**options: Any) -> Exchange:
    exchange = Exchange("s", 1, start_s=10.0, **options)
    exchange.begin(200, {})
    return exchange


def test_first_token_is_the_first_that_says_something() -> None:
    """A chat's opening, which names the role, is no token; neither is the event that ends it."""
    exchange = started(keep_text=True)
    for at_s, value in [(11.0, ROLE), (12.0, said("a")), (12.5, said("b")), (14.0, LAST)]:
        exchange.receive(event(value), at_s)
    exchange.receive(event(USAGE) + DONE, 14.0)
    exchange.close()

    result = exchange.result(14.5)

    assert result.error is None
    assert (result.ttft_s, result.total_s, result.tbt_mean_s) == (2.0, 4.5, 0.25)
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (100, 64)
    assert exchange.reply == "ab"


def test_an_answer_without_text_has_a_first_event() -> None:
    """Where no token ever decodes to text, the first event stands for the first token."""
    exchange = started()
    for at_s, value in [(11.0, ROLE), (12.0, LAST)]:
        exchange.receive(event(value), at_s)
    exchange.receive(DONE, 12.0)

    assert exchange.result(12.0).ttft_s == 1.0


def test_completions_count_tokens_without_text() -> None:
    """In a completion an empty text is a token that did not decode alone, unless it only ends."""
    exchange = started()
    values = [(11.0, written("")), (12.0, written("a")), (13.0, written("", "stop"))]
    for at_s, value in values:
        exchange.receive(event(value), at_s)
    exchange.receive(DONE, 13.0)

    result = exchange.result(13.0)

    assert (result.ttft_s, result.tbt_mean_s) == (1.0, 1.0)


def test_longest_tenth_counts_bundled_tokens() -> None:
    """21 tokens in 11 events: 20 gaps, ten of them zero; the longest tenth are two."""
    exchange = started()
    at_s = 11.0
    for number in range(11):
        exchange.receive(event(said("w")), at_s)
        at_s += 4.0 if number == 3 else 1.0
    exchange.receive(event({"choices": [], "usage": {"completion_tokens": 21}}) + DONE, at_s)

    result = exchange.result(at_s)

    assert result.tbt_tail_s == (4.0 + 1.0) / 2
    assert result.tbt_mean_s == (4.0 + 9 * 1.0) / 20


def test_times_count_from_when_it_was_due() -> None:
    """A late sender makes the times longer, not shorter."""
    exchange = started(due_s=8.0, late_s=2.0)
    exchange.receive(event(said("a")) + DONE, 11.0)

    result = exchange.result(12.0)

    assert (result.start_s, result.due_s, result.late_s) == (10.0, 8.0, 2.0)
    assert (result.ttft_s, result.total_s) == (3.0, 4.0)


@given(st.lists(st.integers(min_value=0, max_value=600), max_size=8))
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    """The stream means the same however the network cut it; CRLF and comments too."""
    stream = b": hello\r\n" + b"".join(
        event(value).replace(b"\n", b"\r\n") for value in (ROLE, said("é"), said("ü"), USAGE)
    )
    exchange = started(keep_text=True)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, stop in itertools.pairwise(bounds):
        exchange.receive(stream[start:stop], 11.0)
    exchange.receive(DONE, 11.0)
    exchange.close()

    result = exchange.result(11.0)

    assert (result.error, exchange.reply, result.num_output_tokens) == (None, "éü", 3)


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"", "broken"),
        (event(said("a")), "broken"),
        (event(said("a")) + b'data: {"choices"', "broken"),
        (b"<html>busy</html>", "garbage"),
        (b'{"choices": []}', "garbage"),
        (b"data: {nonsense\n\n" + DONE, "garbage"),
        (b"data: \xff\xfe\n\n" + DONE, "garbage"),
        (b"data: 17\n\n" + DONE, "garbage"),
        (event({"error": {"message": "engine died"}}), "stream"),
    ],
)
def test_what_is_wrong_is_named(stream: bytes, kind: str) -> None:
    """Streams that break off, that are none, and that carry an error are distinguished."""
    exchange = started()
    exchange.receive(stream, 11.0)
    exchange.close()

    assert exchange.result(12.0).error == kind


@pytest.mark.parametrize(
    "value",
    [
        {"choices": 3},
        {"choices": [None]},
        {"choices": [{"delta": {"content": 5}}], "usage": 7},
        {"usage": {"prompt_tokens": "many", "prompt_tokens_details": 0}},
    ],
)
def test_odd_events_are_no_crash(value: object) -> None:
    """Fields of another type than the API's are as if they were missing."""
    exchange = started(keep_text=True)
    exchange.receive(event(value) + DONE, 11.0)
    exchange.close()

    result = exchange.result(11.0)

    assert (result.error, result.num_prompt_tokens) == (None, None)


def test_headers_of_the_router() -> None:
    """The router's headers are read; what another server means by such names is left alone."""
    exchange = Exchange("s", 0, start_s=0.0)
    exchange.begin(200, {"x-warmroute-cached": "gpu=32;pool=16", "x-warmroute-ms": "0.5"})
    strange = Exchange("s", 0, start_s=0.0)
    strange.begin(200, {"x-warmroute-cached": "gpu=many", "x-warmroute-ms": "fast"})

    assert exchange.result(1.0).predicted == Predicted(gpu=32, pool=16)
    assert exchange.result(1.0).router_ms == 0.5
    assert strange.result(1.0).predicted is None
    assert strange.result(1.0).router_ms is None


def test_errors_keep_keys_and_prompts_out() -> None:
    """A key that the server repeats, and what a validation error quotes, are not recorded."""
    exchange = started(secret="sk-1234")
    exchange.begin(401, {})
    exchange.refuse(b'{"error": {"message": "wrong key: sk-1234"}}')

    assert exchange.result(1.0).error == "http_401"
    assert exchange.result(1.0).error_message == "wrong key: ***"
    quoted = b"""{"message": "1 validation error: {'loc': 'body', 'input': 'my prompt'}"}"""
    assert "my prompt" not in error_text(quoted)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no", "code": 5}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"Bad\n  Gateway", "Bad Gateway"),
        (b"[1]", "[1]"),
        (b"", ""),
    ],
)
def test_error_shapes(body: bytes, text: str) -> None:
    """What an error answer says is found in the usual shapes."""
    assert error_text(body) == text
