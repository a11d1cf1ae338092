"""Fuzz: any JSON object, written in any way, and any of its members taken out or set."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.api.body import with_fields, without_fields
from router.base.errors import BadRequest

NAMES = ("cache_salt", "priority", "kv_transfer_params")
TEXTS = st.text(max_size=8) | st.sampled_from((*NAMES, '"priority":1', "\\", '"', "}{,"))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
MEMBERS = st.lists(st.tuples(TEXTS, VALUES), max_size=8)


def spelt(text: str, draw: random.Random) -> str:
    """Write a string as JSON, each character plain or as an escape."""
    written = []
    for character in text:
        if draw.random() < 0.5 or "\ud800" <= character <= "\udfff":
            written.append(json.dumps(character)[1:-1])
        elif draw.random() < 0.5 and character not in '"\\' and character >= " ":
            written.append(character)
        else:
            escaped = json.dumps(character)[1:-1]
            wide = f"\\u{ord(character):04X}" if ord(character) < 0x10000 else escaped
            written.append(wide)
    return '"' + "".join(written) + '"'


def written(members: list[tuple[str, Any]], draw: random.Random) -> tuple[bytes, list[bytes]]:
    """Write an object with white space anywhere; also its members as they stand there."""

    def space() -> str:
        return "".join(draw.choices(" \t\r\n", k=draw.choice((0, 0, 1, 3))))

    made = [f"{spelt(key, draw)}{space()}:{space()}{json.dumps(value)}" for key, value in members]
    inside = ",".join(f"{space()}{member}{space()}" for member in made)
    body = f"{space()}{{{inside or space()}}}{space()}"
    return body.encode("utf-8"), [member.encode("utf-8") for member in made]


def pairs(body: bytes | str) -> Any:
    """Read an object as a list of its members, none lost."""
    return json.loads(body, object_pairs_hook=list)


@given(MEMBERS, st.randoms(use_true_random=False), st.sets(st.sampled_from(NAMES)))
def test_removing_members_is_removing_keys(
    members: list[tuple[str, Any]], draw: random.Random, names: set[str]
) -> None:
    """The result means the object without these keys; all other members are the same bytes."""
    body, made = written(members, draw)

    left = without_fields(body, names)

    kept = [pair for pair in members if pair[0] not in names]
    alone = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in kept)
    assert pairs(left) == pairs(f"{{{alone}}}")
    index = 0
    for (key, _), member in zip(members, made, strict=True):
        if key not in names:
            index = left.index(member, index) + len(member)


@given(MEMBERS, st.randoms(use_true_random=False), st.sampled_from(NAMES), TEXTS)
def test_setting_a_member_is_setting_a_key(
    members: list[tuple[str, Any]], draw: random.Random, name: str, value: str
) -> None:
    """The result means the object with this key, once."""
    body, _ = written(members, draw)

    made = with_fields(body, {name: value})

    assert [key for key, _ in pairs(made)].count(name) == 1
    assert json.loads(made) == json.loads(body) | {name: value}


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_edited_or_refused(body: bytes) -> None:
    """No other error comes out."""
    try:
        left = without_fields(body, NAMES)
    except BadRequest:
        return
    assert json.loads(left).keys().isdisjoint(NAMES)
