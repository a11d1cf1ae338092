"""router.api.body_fields: members go or come, every other byte is the client's."""

from __future__ import annotations

import time

import pytest

from router.api.body_fields import with_fields, without_fields
from router.base.errors import BadRequest

NAMES = ("cache_salt", "priority")

CASES = [
    (b'{"a":1}', b'{"a":1}'),
    (b"{}", b"{}"),
    (b'{"priority":1}', b"{}"),
    (b'{"priority":1,"a":2}', b'{"a":2}'),
    (b'{"a":2,"priority":1}', b'{"a":2}'),
    (b'{"a":2,"priority":1,"cache_salt":"x"}', b'{"a":2}'),
    (b'{"priority":1,"cache_salt":"x"}', b"{}"),
    (b' {\n "a" : 1.10 ,\t"priority" :\r\n{"b":[1,{}]} ,\n "c":2 } ',
     b' {\n "a" : 1.10 ,\t\n "c":2 } '),
    (b'{"a":1 , "priority" : null }', b'{"a":1  }'),
    # All occurrences, however they are spelt.
    (b'{"priority":1,"priority":[2],"a":0,"priority":"3"}', b'{"a":0}'),
    (b'{"a":0,"\\u0070riority":1,"cache\\u005Fsalt":"x"}', b'{"a":0}'),
    # What only looks like one.
    (b'{"a":{"priority":1},"b":["priority",2],"c":"\\"priority\\":1,"}',) * 2,
    (b'{"Priority":1,"priority ":2,"\\\\u0070riority":3,"prioritz":4}',) * 2,
    ('{"é\U0001f600":"\\ud83d\\ude00","priority":"\\\\","z":"\\""}'.encode(),
     '{"é\U0001f600":"\\ud83d\\ude00","z":"\\""}'.encode()),
]  # fmt: skip


@pytest.mark.parametrize(("body", "left"), CASES)
def test_named_members_go(body: bytes, left: bytes) -> None:
    """Each is removed with one comma; the remaining bytes are unchanged."""
    assert without_fields(body, NAMES) == left


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (b"{}", b'{"cache_salt":"t1"}'),
        (b' { } ', b' {"cache_salt":"t1" } '),
        (b'{"a":1}', b'{"cache_salt":"t1","a":1}'),
        (b'{ "a":1, "cache_s\\u0061lt":"mine"}', b'{"cache_salt":"t1", "a":1}'),
    ],
)  # fmt: skip
def test_a_member_is_set(body: bytes, made: bytes) -> None:
    """It becomes the first member, and the only one of its name."""
    assert with_fields(body, {"cache_salt": "t1"}) == made


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"1", b'{"a":', b'{"a":1}{"priority":2}', b'{"a":NaN}', b"\xff\xfe{\0}\0"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """As the client's mistake."""
    with pytest.raises(BadRequest, match="not a JSON object"):
        without_fields(body, NAMES)


def test_deep_nesting_is_refused() -> None:
    """The error is a BadRequest, no RecursionError."""
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"priority":1}'

    with pytest.raises(BadRequest, match="too deep"):
        without_fields(body, NAMES)


def test_a_key_that_is_repeated_too_often_is_refused() -> None:
    """Each occurrence costs a pass over the body."""
    assert without_fields(b'{"priority":1' + b',"priority":2' * 7 + b"}", NAMES) == b"{}"
    with pytest.raises(BadRequest, match="`priority` occurs more than 8 times"):
        without_fields(b'{"priority":1' + b',"priority":2' * 8 + b"}", NAMES)


FILLERS = {
    "brackets": b'"a":[' + b"{}," * 2_000_000 + b"1]",
    "keys": b'"a":1' + b',"a":1' * 1_000_000,
    "space": b'"a":1' + b" " * 6_000_000,
    "escapes": b'"a":"' + b"\\n" * 3_000_000 + b'"',
}


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_hostile_bodies_cost_little(filler: bytes) -> None:
    """6 MB take some tens of milliseconds at most, whatever their content."""
    body = b"{" + filler + b',"priority":1' + b" " * 6_000_000 + b"}"

    started_s = time.process_time()
    left = without_fields(body, NAMES)
    assert time.process_time() - started_s < 0.5
    assert left == b"{" + filler.rstrip() + left[1 + len(filler.rstrip()) :]
    assert b"priority" not in left
