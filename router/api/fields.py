"""Fields of a decoded JSON body, read as leniently as vLLM reads them.

Errors name the field, the type that it must have, and the type that came.

The fields that routing needs of a body with too many values to parse whole.

A JSON parser holds the event loop while it runs: 1 s for 23 MB of small keys. `costs_ms` bounds
that time by counting bytes. A body above the bound is outlined: msgspec skips the values of other
fields without building them. It takes 30 to 55 ms for 20 MB of small values, 5 to 20 ms for text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw, Struct

from router.base.errors import BadRequest

Body = Mapping[str, Any]
"""A decoded JSON object."""

TRUE = frozenset({"true", "1", "yes", "y", "on", "t"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "f"})


def text_of(body: Body, field: str) -> str | None:
    """Return a text."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        wrong(field, "a string", value)
    return value


def int_of(body: Body, field: str) -> int | None:
    """Return a number; as in the engine, a text may have it."""
    value = body.get(field)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            wrong(field, "an integer", value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is not None and not isinstance(value, int):
        wrong(field, "an integer", value)
    return value


def bool_of(body: Body, field: str, default: bool, *, nullable: bool = False) -> bool:
    """Return a switch; as in the engine, 0, 1 and words such as "yes" are switches, too."""
    value = body.get(field, default)
    if isinstance(value, bool):
        return value
    if value is None and nullable:
        return default
    if value in (0.0, 1.0):
        return bool(value)
    word = str(value).lower() if isinstance(value, str | int) else ""
    if word not in TRUE and word not in _FALSE:
        wrong(field, "true or false", value)
    return word in TRUE


def object_of(body: Body, field: str) -> Body | None:
    """Return an object."""
    value = body.get(field)
    if value is not None and not isinstance(value, dict):
        wrong(field, "an object", value)
    return value


def objects_of(body: Body, field: str) -> Sequence[Body] | None:
    """Return a list of objects."""
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, list):
        wrong(field, "a list of objects", value)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            wrong(f"{field}[{index}]", "an object", item)
    return value


_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def wrong(param: str, expected: str, value: object, *, missing: bool = False) -> NoReturn:
    """Raise the error for a field that is missing or of the wrong type."""
    got = "it is missing" if missing else f"got {_JSON_NAMES.get(type(value), 'something else')}"
    raise BadRequest(f"`{param}` must be {expected}; {got}", param=param)


SMALL_BYTES: Final = 256 * 1024
"""Bodies up to this are parsed at once: 10 ms if they are only keys, else less than 1 ms."""

LARGE_BYTES: Final = 8 * 1024 * 1024
"""Bodies beyond this are outlined: parsing 30 MB of text takes 50 to 70 ms."""

AT_ONCE_MS: Final = 40.0
"""Bodies with a higher bound are outlined. Colons and commas in texts count, too: 2.5 MB of code
have this bound."""

MOST_MS: Final = 400.0
"""Bodies with a higher bound are refused, because even an outline would hold the loop for too long.
A prompt of 6 million token ids has this bound."""

_US_PER_COLON: Final = 0.5  # a key and its place in an object; measured, as the others, on 2 GHz
_US_PER_COMMA: Final = 0.06
_US_PER_BRACKET: Final = 0.15
_SMALL_FIELD: Final = 4096  # bytes of JSON; longer fields are left out


class Outline(Struct, frozen=True, kw_only=True):
    """The short top-level fields of a body, and the withheld ones that it has."""

    fields: dict[str, Any] = {}
    withheld: tuple[str, ...] = ()


class _Sketch(Struct, frozen=True, kw_only=True):
    """The fields of interest as views into the body; an absent one is empty."""

    model: Raw = Raw()
    stream: Raw = Raw()
    stream_options: Raw = Raw()
    n: Raw = Raw()
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    truncation: Raw = Raw()
    cache_salt: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    previous_response_id: Raw = Raw()
    request_id: Raw = Raw()
    store: Raw = Raw()
    background: Raw = Raw()
    metadata: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    vllm_xargs: Raw = Raw()
    priority: Raw = Raw()
    sampling_params: Raw = Raw()


class _Sampling(Struct):
    extra_args: Raw = Raw()


_WITHHELD: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority")
EXTRA_ARGS: Final = "sampling_params.extra_args"
_OTHERS: Final = frozenset({"sampling_params", *_WITHHELD})
_FIELDS: Final = tuple(name for name in _Sketch.__struct_fields__ if name not in _OTHERS)
_sketch = msgspec.json.Decoder(_Sketch)


def make_outline(body: bytes) -> Outline:
    """Outline a body.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        return _outlined(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc


def _outlined(body: bytes) -> Outline:
    sketch = _sketch.decode(body)
    fields = {
        name: msgspec.json.decode(raw)
        for name in _FIELDS
        if 0 < memoryview(raw := getattr(sketch, name)).nbytes <= _SMALL_FIELD
    }
    withheld = [name for name in _WITHHELD if memoryview(getattr(sketch, name)).nbytes]
    if bytes(memoryview(sketch.sampling_params)[:1]) == b"{":
        sampling = msgspec.json.decode(sketch.sampling_params, type=_Sampling)
        withheld += [EXTRA_ARGS] if memoryview(sampling.extra_args).nbytes else []
    return Outline(fields=fields, withheld=tuple(withheld))


def costs_ms(body: bytes) -> float:
    """Bound the time of parsing a body whole, by counting its bytes (0.4 ms a megabyte)."""
    import numpy as np  # late: `--help` takes 0.1 s less

    bytes_of = np.frombuffer(body, np.uint8)
    num_colons, num_commas, num_brackets = (
        int(np.count_nonzero(bytes_of == byte)) for byte in b":,["
    )
    us = num_colons * _US_PER_COLON + num_commas * _US_PER_COMMA + num_brackets * _US_PER_BRACKET
    return us / 1000
