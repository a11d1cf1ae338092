"""Outlines of bodies that are not read whole."""

from __future__ import annotations

from contextlib import suppress

import orjson
import pytest

from router.api.apis import APIS
from router.api.body import AT_ONCE_MS, FIELDS, MOST_MS, Outline, Withheld, costs_ms, make_outline
from router.base.errors import BadRequest


def test_short_fields_are_kept() -> None:
    """Fields that routing needs are found wherever they stand; long values are not kept."""
    body = b'{"messages":[],"model":"m","stream":true,"n":2,"metadata":{"user_id":"u"},"x":1,'
    body += b'"cache_salt":"' + b"s" * 5000 + b'"}'

    made = make_outline(body)

    assert made.fields == {"model": "m", "stream": True, "n": 2, "metadata": {"user_id": "u"}}


@pytest.mark.parametrize(
    "body",
    [b'{"model":"\xff"}', b'{"messages":[],"\xff":1}', b'{"prompt":"\xff"}', b'{"prompt":["\xff"]}',
     b'{"metadata":{"\xff":1}}'],
)  # fmt: skip
def test_what_is_not_utf_8_is_no_json(body: bytes) -> None:
    """Invalid UTF-8 is refused, or skipped and left to the engine to refuse."""
    with suppress(ValueError):
        assert not make_outline(body).fields


@pytest.mark.parametrize("name", ["priority", "kv_transfer_params", "sampling_params.extra_args"])
def test_withheld_fields_are_found(name: str) -> None:
    """Their values may be anything; a body that cannot be taken apart is refused with them."""
    outer, _, inner = name.partition(".")
    made = make_outline(orjson.dumps({outer: {inner: None} if inner else None}))

    assert made.withheld == (name,)
    with pytest.raises(BadRequest) as caught:
        Withheld().check_outline(made)
    assert caught.value.param == name
    Withheld(FIELDS).check_outline(made)


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b'{"a":', b'{"a":1}x', b'{"x":' + b"[" * 9999])
def test_what_is_no_object_is_wrong(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        make_outline(body)


def test_a_body_costs_by_its_values() -> None:
    """Text costs little, many keys cost much."""
    text = {"messages": [{"role": "user", "content": "some words, " * 200_000}]}
    values = {"x": {str(number): [] for number in range(200_000)}}

    assert costs_ms(orjson.dumps(text)) < AT_ONCE_MS < costs_ms(orjson.dumps(values)) < MOST_MS


def test_an_outline_is_a_request_for_the_engine() -> None:
    """Its fields count, its prompt is not rendered."""
    outline = Outline(fields={"model": "m", "stream": True, "max_tokens": 3, "cache_salt": "s"})

    for api in APIS.values():
        request = api.outlined(outline)
        assert request is not None
        assert (request.model, request.stream) == ("m", True)
        assert (request.cache_salt, request.engine_only) == ("s", "size")
