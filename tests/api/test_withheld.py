"""router.api.withheld: fields and headers that are not the clients' own."""

from __future__ import annotations

import orjson
import pytest

from router.api.withheld import FIELDS, Withheld
from router.base.errors import BadRequest

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
