"""What surely does not fit a model is refused in the engine's own words."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.fit import check_fits, check_text_fits, sizes_of
from router.api.openai import parse_chat, parse_completion
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
    check_fits(sizes_of(request), 10, 4)


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
    check_fits(sizes_of(parse_completion({"prompt": "x" * 1000})), 10, None)
    check_text_fits(40, 10, 4)
