"""Messages that bodies have in common are parsed once, and nothing else changes."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.digests import MAX_MESSAGES, parts_of
from router.api.known_messages import KnownMessages


def _messages(num: int, seed: int = 1) -> list[dict[str, Any]]:
    """Make a conversation; its messages have some 3,000 bytes each."""
    rng = random.Random(seed)
    texts = ['say "},{"role":"', "naïve \u2013 text\n", "\\u0000\\", "💡 plain words "]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent."}]
    while len(messages) < num:
        text = "".join(rng.choice(texts) for _ in range(200))
        call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"x": text[:99]})}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "content": [{"type": "text", "text": text}]})
    return messages[:num]


def _body(messages: list[dict[str, Any]], *, spaced: bool = False, **fields: Any) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    body = {"model": "m", "messages": messages, "tools": [{"name": "t"}], **fields}
    return json.dumps(body, separators=separators, ensure_ascii=spaced).encode()


def _read(known: KnownMessages, body: bytes, owner: str = "") -> tuple[Any, int]:
    """Parse a body; also return how many of its bytes were new."""
    found = known.find(body, owner)
    if found is None:
        return None, len(body)
    parsed = known.parse(body, found)
    return parsed and parsed.view, found.num_new_bytes


@pytest.mark.parametrize("spaced", [False, True])
def test_a_turn_costs_what_it_added(spaced: bool) -> None:
    """Every turn is parsed as if whole, and of a later one only what is new and its last piece."""
    known, messages = KnownMessages(), _messages(120)

    for num in range(40, 120, 4):
        body = _body(messages[:num], spaced=spaced, temperature=num)
        view, num_new = _read(known, body)

        assert view == orjson.loads(body)
        assert list(view) == ["model", "messages", "tools", "temperature"]
        assert num_new == len(body) if num == 40 else num_new < 40_000


@pytest.mark.parametrize("item", [{}, [1], {"type": "text", "text": "12345"}, "x" * 50])
def test_the_budget_holds_whatever_is_in_it(item: Any) -> None:
    """Objects take more than their text: 3 times the budget was held of empty ones."""
    known = KnownMessages(max_bytes=1 << 20)
    num_items = 2_000 // len(json.dumps(item))
    tracemalloc.start()
    try:
        for number in range(12):
            content = [[item] * num_items, number]
            _read(known, _body([{"role": "user", "content": content}] * 60))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 0.2 < size_bytes / (1 << 20) < 1.3


def test_history_that_was_changed_counts_up_to_there() -> None:
    """What a client rewrote is parsed anew, with all that is behind it."""
    known, messages = KnownMessages(), _messages(80)
    _read(known, _body(messages))
    changed = [*messages[:40], {"role": "user", "content": "rewritten"}, *messages[41:]]

    view, num_new = _read(known, _body(changed))

    assert view["messages"] == changed
    assert len(_body(messages)) / 3 < num_new < 2 * len(_body(messages)) / 3


def test_what_others_sent_is_not_found() -> None:
    """How long a body takes tells a client nothing of another's."""
    known, body = KnownMessages(), _body(_messages(80))
    _read(known, body, "a")

    assert _read(known, body, "b")[1] == len(body)
    assert _read(known, body, "a")[1] < len(body) / 3


def test_memory_is_bounded() -> None:
    """The least recently used messages go first."""
    known = KnownMessages(max_bytes=1 << 20)
    bodies = [_body(_messages(60, seed)) for seed in range(12)]

    for body in bodies:
        _read(known, body)

    assert 0 < known.size_bytes <= 1 << 20
    assert _read(known, bodies[-1])[1] < len(bodies[-1]) / 2
    assert _read(known, bodies[0])[1] == len(bodies[0])


_LONG = _messages(60)
_NESTED = [{**each, "given": [{"x": 1}, {"role": "a"}] * 400} for each in _LONG]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_body(_LONG)[:-1] + b',"messages":[{"role":"user"}]}', id="twice"),
        pytest.param(b'{"m":' + _body(_LONG) + b',"messages":[]}', id="deeper"),
        pytest.param(_body(_LONG)[:-1] + b',"mess\\u0061ges":[{}]}', id="twice, escaped"),
        pytest.param(_body(_NESTED), id="boundaries within messages"),
        pytest.param(_body([{"role": "user", "content": "x" * 99_000}]), id="one message"),
        pytest.param(b'[{"a":1},' + _body(_LONG) + b"]", id="no object"),
        pytest.param(_body(_LONG).replace(b'"messages"', b'"input"', 1), id="other name"),
    ],
)
def test_other_bodies_are_parsed_whole(body: bytes) -> None:
    """Where the list is not the body's messages, or cannot be cut, nothing is made of it."""
    known = KnownMessages()
    _read(known, _body(_LONG))

    for _ in range(2):
        assert _read(known, body)[0] is None


def _at_boundary(body: bytes, number: int, between: bytes) -> bytes:
    """Put something else in the place of the comma between two messages."""
    parts = body.split(b'},{"role":')
    head = b'},{"role":'.join(parts[:number])
    return head + b"}" + between + b'{"role":' + b'},{"role":'.join(parts[number:])


@pytest.mark.parametrize("between", [b"", b" ", b";", b",,", b"]", b"],[", b'],"x":[', b"}", b",}"])
@pytest.mark.parametrize("number", [1, 20, 59])
def test_broken_bodies_are_not_parsed(between: bytes, number: int) -> None:
    """What is no JSON is none behind known messages either."""
    body = _at_boundary(_body(_LONG), number, between)

    def read(known: KnownMessages) -> object:
        try:
            whole = orjson.loads(body)
        except orjson.JSONDecodeError:
            whole = None
        view = _read(known, body)[0]
        assert view is None or view == whole
        return view

    fresh, used = KnownMessages(), KnownMessages()
    _read(used, _body(_LONG))
    read(fresh)
    read(used)


def test_depth_is_bounded_alike() -> None:
    """A message may be nested as deep as in a body that is parsed whole, and no deeper."""
    for depth in range(1018, 1026):
        deep = b"[" * depth + b"]" * depth
        first = _body(_LONG).replace(b'"You are an agent."', deep, 1)
        is_whole = True
        try:
            orjson.loads(first)
        except orjson.JSONDecodeError:
            is_whole = False

        assert (_read(KnownMessages(), first)[0] is not None) == is_whole, depth


@given(
    st.integers(0, len(_body(_LONG)) - 1),
    st.integers(0, 40),
    st.binary(max_size=4) | st.sampled_from([b'"', b"\\", b"{", b"}", b",", b"]", b'},{"role":"']),
)
def test_a_body_changed_anywhere_is_read_as_if_whole(at: int, cut: int, put: bytes) -> None:
    """Whatever is cut or put into a known body: it is parsed as whole, or not at all."""
    known = KnownMessages()
    _read(known, _body(_LONG))
    body = _body(_LONG)
    body = body[:at] + put + body[at + cut :]
    view = _read(known, body)[0]

    if view is not None:
        assert view == orjson.loads(body)


def test_a_body_of_countless_messages_is_not_digested() -> None:
    """Digests of 100,000 messages would hold the loop for 0.1 s."""
    known = KnownMessages()
    messages = [{"role": "user"}] * (3 * MAX_MESSAGES)
    body = orjson.dumps({"messages": messages, "model": "m"})
    found = known.find(body)
    assert found is not None
    parsed = known.parse(body, found)

    assert parsed is not None
    assert len(parsed.view["messages"]) == 3 * MAX_MESSAGES
    assert parsed.digests == []
    assert parts_of("/v1/chat/completions", parsed.view, parsed.digests) is None
