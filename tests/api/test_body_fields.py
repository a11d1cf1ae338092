"""router.api.body: members go or come, every other byte is the client's.

router.api.body: fields and headers that are not the clients' own.
"""

from __future__ import annotations

import time

import orjson
import pytest

from router.api.body import FIELDS, Withheld, with_fields, without_fields
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


FORM = "multipart/form-data; boundary=x"


def test_the_fields_go_and_only_they() -> None:
    """They are removed from the bytes and from the parsed view."""
    body = b'{ "kv_transfer_params":{"a":[1]}, "messages" : [ {"priority":1} ],"priority":-9 }'
    view = orjson.loads(body)

    left = Withheld().strip(body, view)

    assert left == b'{  "messages" : [ {"priority":1} ] }'
    assert view == orjson.loads(left)


def test_a_body_without_them_is_not_touched() -> None:
    """It is the same object."""
    body = b'{"messages":[]}'

    assert Withheld().strip(body, orjson.loads(body)) is body


@pytest.mark.parametrize("name", FIELDS)
def test_each_can_be_let_through(name: str) -> None:
    """The others are removed all the same."""
    body = orjson.dumps(dict.fromkeys(FIELDS, 1))

    assert orjson.loads(Withheld([name]).strip(body, orjson.loads(body))) == {name: 1}


def test_headers_go_with_their_fields() -> None:
    """The header for the rank is always removed: the router sets it."""
    assert Withheld().headers == {"x-data-parallel-rank", "x-vllm-priority"}
    assert Withheld(["priority"]).headers == {"x-data-parallel-rank"}


def test_sampling_params_have_no_back_door() -> None:
    """`extra_args` of `/inference/v1/generate` is what other routes call vllm_xargs."""
    body = b'{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}'

    with pytest.raises(BadRequest, match=r"sampling_params\.extra_args.*client_fields"):
        Withheld().strip(body, orjson.loads(body))
    assert Withheld(["vllm_xargs"]).strip(body, orjson.loads(body)) is body


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}\r\n--x--', FORM),
        (b"--x\r\nContent-Disposition: form-data; name*=utf-8''vllm%5Fxargs\r\n\r\n1", FORM),
        (b'--x\r\ncontent-DISPOSITION:form-data; NAME = "vllm_xargs" \r\n\r\n1\r\n--x--', FORM),
        (b"--x\r\nContent-Disposition: form-data; name=vllm_xargs\r\n\r\n1\r\n--x--", FORM),
        (b'--x\r\nContent-Disposition: a; name="b"; name="vllm_xargs"\r\n\r\n1\r\n--x--', FORM),
        (b'--x\r\nContent-Disposition: a; q="\\";name="; name=vllm_xargs\r\n\r\n1\r\n--x--', FORM),
        (b"--x\r\nContent-Disposition: a; name*0=vllm_; name*1=xargs\r\n\r\n1\r\n--x--", FORM),
        (b'\r\n--x \t\r\nContent-Disposition: a; name="vllm_xargs"\r\n\r\n1\r\n--x--', FORM),
        (b'--x\r\nA: b\r\n folded: c\r\nContent-Disposition: a; name="b"\r\n\r\n1\r\n--x--', FORM),
        (b"a=1", "application/x-www-form-urlencoded"),
        (b"a=1", ""),
        (b"--x", f"{FORM}; charset=utf-7"),
        (b"--x", f"{FORM}; charset=utf-8; charset=utf-7"),
        (b"--x", f"{FORM}; charset*=utf-7"),
    ],
)
def test_a_form_that_may_have_one_is_refused(body: bytes, kind: str) -> None:
    """A form that readers may read differently is refused, too."""
    with pytest.raises(BadRequest):
        Withheld().check_form(body, kind)
    Withheld(["vllm_xargs"]).check_form(body, kind)


@pytest.mark.parametrize(
    "kind", [FORM, f'{FORM}; charset="UTF-8"', 'Multipart/FORM-DATA;Boundary="x"']
)
def test_a_form_without_is_not(kind: str) -> None:
    """Audio and its usual fields pass."""
    Withheld().check_form(
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\0\r\n--x--', kind
    )


@pytest.mark.parametrize(
    "content",
    [
        b"vllm_xargs name*=utf-8''vllm_xargs",
        b'\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}',
        b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}',
        b'\n--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}',
        b'\r\n--x--\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}',
    ],
)
def test_content_that_looks_like_a_part_is_content(content: bytes) -> None:
    """As python-multipart 0.0.34 reads it."""
    head = b"--x\r\nContent-Disposition: form-data; name=file; filename*=utf-8''a.wav\r\n\r\n"

    Withheld().check_form(head + content + b"\r\n--x--\r\n", FORM)
