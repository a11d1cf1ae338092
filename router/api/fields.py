"""Fields of a decoded JSON body, read as leniently as vLLM reads them.

Errors name the field, the type that it must have, and the type that came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

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
