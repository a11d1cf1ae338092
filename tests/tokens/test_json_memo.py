"""JSON parsed and printed once."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from router.tokens.conversation import JsonMemo
from router.tokens.needs_engine import NeedsEngine


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("null", {}),
        ("[1]", {}),
        ('{"a"', {}),
        ('{"a": NaN}', None),
    ],
)
def test_arguments(text: str, value: dict[str, Any] | None) -> None:
    """Arguments are an object, or none."""
    parsed = JsonMemo().arguments(text)

    assert parsed == value if value is not None else parsed["a"] != parsed["a"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n": ' + "1" * 5000 + "}"])
def test_what_the_engine_trips_over(text: str) -> None:
    """JSON on which the engine's parser gives up is not guessed."""
    with pytest.raises(NeedsEngine):
        JsonMemo().arguments(text)


def test_printed_once() -> None:
    """A remembered value is printed once, with options every time, others every time."""
    printed: list[object] = []

    def tojson(value: object, indent: int | None = None) -> str:
        printed.append(value)
        return json.dumps(value, indent=indent)

    memo = JsonMemo()
    filtered = memo.wrap(tojson)
    held = memo.arguments('{"a": 1}')

    assert [filtered(held), filtered(held)] == ['{"a": 1}', '{"a": 1}']
    assert len(printed) == 1
    assert filtered(held, indent=1) == '{\n "a": 1\n}'
    assert [filtered({"b": 2}), filtered({"b": 2})] == ['{"b": 2}', '{"b": 2}']
    assert len(printed) == 4


def test_budget() -> None:
    """The values not used for longest go, their JSON with them; too large ones never come."""
    memo = JsonMemo(max_bytes=3_000)
    filtered = memo.wrap(json.dumps)
    texts = [f'{{"n": {n}}}' for n in range(8)]
    first = memo.arguments(texts[0])
    filtered(first)

    for text in texts:
        memo.arguments(text)
        memo.arguments(texts[0])  # used again and again
    huge = memo.arguments(json.dumps({"n": "x" * 3_000}))

    assert memo.get(texts[0]) is first
    assert memo.get(texts[1]) is None
    assert memo.get(texts[7]) is not None
    assert huge["n"][0] == "x"
    assert memo.get(json.dumps({"n": "x" * 3_000})) is None
    for text in texts:
        memo.arguments(text)  # in every order, whatever was dropped
    assert filtered(memo.arguments(texts[3])) == texts[3]


@pytest.mark.parametrize("item", ["{}", "[1]", '"ab"', "12345", '{"key":"value"}'])
def test_the_budget_holds_whatever_is_in_it(item: str) -> None:
    """Objects take more than their text: 6 times the budget was held of empty ones."""
    memo = JsonMemo(max_bytes=1 << 18)
    filtered = memo.wrap(lambda value: json.dumps(value, separators=(",", ":")))
    tracemalloc.start()
    try:
        for number in range(80):
            filtered(memo.arguments(f'{{"n{number}":[{",".join([item] * 500)}]}}'))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 0.2 < size_bytes / (1 << 18) < 1.3


def test_an_owners_part_is_found_by_no_other() -> None:
    """Of one budget, and printed once each."""
    memo = JsonMemo(max_bytes=3000)
    one, other = memo.of("a"), memo.of("b")
    value = one.arguments('{"x": 1}')

    assert one.arguments('{"x": 1}') is value
    assert other.arguments('{"x": 1}') is not value
    assert memo.get('{"x": 1}') is None
    assert memo.of("") is memo
    for number in range(100):
        other.arguments(f'{{"x": {number}}}')
    assert one.get('{"x": 1}') is None
    assert memo.size_bytes <= 3000
