"""What surely does not fit a model is refused in the engine's own words."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.openai import Limit, is_cut, parse_chat, parse_completion
from router.base.errors import BadRequest

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}

TOO_LONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [MESSAGE] * 11}, "messages"),
    ({"messages": [MESSAGE], "tools": [TOOL] * 11}, "tools"),
    ({"prompt": [1] * 11}, "input_tokens"),
    ({"prompt": [[1], [1] * 11]}, "input_tokens"),
    ({"prompt": "x" * 41}, "input_text"),
    ({"prompt": ["x", "x" * 41]}, "input_text"),
]
FITS: list[dict[str, Any]] = [
    {"messages": [MESSAGE] * 10, "tools": [TOOL] * 10},
    {"prompt": [1] * 10},
    {"prompt": [[1] * 10] * 100},
    {"prompt": "x" * 40},
    {"prompt": [1] * 11, "truncate_prompt_tokens": 5},
    {"prompt": "x" * 41, "truncate_prompt_tokens": 5},
]


def check(body: dict[str, Any]) -> None:
    """Hold a body against a model of 10 tokens, of at most 4 characters each."""
    request = parse_chat(body) if "messages" in body else parse_completion(body)
    limit = Limit(max_tokens=10, max_chars_per_token=4, is_cut=is_cut(request))
    limit.check(request)


@pytest.mark.parametrize(("body", "param"), TOO_LONG)
def test_too_long(body: dict[str, Any], param: str) -> None:
    """The field is named and the limit."""
    with pytest.raises(BadRequest, match="maximum context length is 10 tokens") as caught:
        check(body)

    assert caught.value.param == param


@pytest.mark.parametrize("body", FITS)
def test_what_may_fit_fits(body: dict[str, Any]) -> None:
    """Only what is certainly too long is refused; what the engine truncates is let through."""
    check(body)


def test_without_a_vocabulary_texts_are_not_judged() -> None:
    """Without a vocabulary it is not known how many characters a token has at most."""
    limit = Limit(max_tokens=10, is_proven=True)
    limit.check(parse_completion({"prompt": "x" * 1000}))

    assert limit.takes_text(41)


@pytest.mark.parametrize(
    ("limit", "takes"),
    [
        (Limit(max_tokens=10, max_chars_per_token=4), True),
        (Limit(max_tokens=10, max_chars_per_token=4, is_proven=True), None),
        (Limit(max_tokens=5, max_chars_per_token=4), False),
        (Limit(), True),
    ],
)
def test_a_text_is_refused_only_where_our_tokens_are_the_engines(
    limit: Limit, takes: bool | None
) -> None:
    """Another text that is far too long, 8 characters a token, is not tokenized."""
    if takes is None:
        with pytest.raises(BadRequest, match="41 characters"):
            limit.takes_text(41)
    else:
        assert limit.takes_text(41) == takes


def test_tokens() -> None:
    """Those of a prompt that is cut are worth knowing up to one token less."""
    assert Limit(max_tokens=10).takes_tokens(10)
    assert not Limit(max_tokens=10).takes_tokens(11)
    assert not Limit(max_tokens=10, is_cut=True).takes_tokens(10)
    assert not Limit().takes_tokens(1_000_001)
    with pytest.raises(BadRequest, match="11 input tokens"):
        Limit(max_tokens=10, is_proven=True).takes_tokens(11)
