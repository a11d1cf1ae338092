"""What is refused, in the words of people who write a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

_KINDS: Final = {
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "str": "text",
    "array": "a list",
    "object": "a mapping",
}
_MORE: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_MAX_SHOWN: Final = 40

_TYPE: Final = re.compile(r"Expected `([\w| ]+)`, got `(\w+)`")
_RANGE: Final = re.compile(r"Expected `\w+(?: \| null)?` ([<>]=?) ([\d.e+-]+)")
_LENGTH: Final = re.compile(
    r"Expected `(\w+)(?: \| null)?` of (?:length )?([<>]=?|at \w+ length) ?(\d+)"
)
_ENUM: Final = re.compile(r"Invalid enum value")
_PATTERN: Final = re.compile(r"Expected `str(?: \| null)?` matching regex '\^\[A-Za-z0-9._-\]")
_ANY_PATTERN: Final = re.compile(r"Expected `str(?: \| null)?` matching regex '(.*)'$")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")

UNKNOWN: Final = object()
"""The value is not known, or must not be shown."""


def meant(name: str, known: Iterable[str]) -> str:
    """Ask after an unknown name whether the most similar one was meant; empty: none is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def in_words(text: str, value: Any = UNKNOWN, choices: tuple[str, ...] = ()) -> str:
    """Write a message of msgspec for people, as in "must be a number, not 'eighty'".

    Args:
        text: The message, without its place.
        value: The refused value; it is shown if it is a number or a short text.
        choices: The values that are allowed; (): not a closed set.

    Returns:
        The message as it is, if it is of no known form.
    """
    if _ENUM.match(text) and choices:
        return f"must be {_either(choices)}{_not(value)}"
    if found := _TYPE.match(text):
        kinds = [kind for kind in found[1].split(" | ") if kind != "null"]
        is_fraction = isinstance(value, float) or found[2] == "float"
        names = {"int": "a whole number"} if is_fraction and "float" not in kinds else {}
        wanted = dict.fromkeys((_KINDS | names).get(kind, kind) for kind in kinds)
        instead = _as_list(value) if wanted == {"a list": None} else ""
        instead = (
            instead
            or _not(value)
            or ("" if is_fraction else f", not {_KINDS.get(found[2], found[2])}")
        )
        return f"must be {_either(tuple(wanted))}{instead}"
    if found := _RANGE.match(text):
        return f"must be {_MORE[found[1]]} {float(found[2]):.12g}{_not(value)}"
    if found := _LENGTH.match(text):
        what = "characters" if found[1] == "str" else "entries"
        return f"must have {_MORE[found[2]]} {found[3]} {what}"
    if _PATTERN.match(text):
        return f"must consist of letters, digits, '.', '_' and '-' (at most 64){_not(value)}"
    if found := _ANY_PATTERN.match(text):
        return f"must match {found[1]}{_not(value)}"
    if found := _MISSING.match(text):
        return f"{found[1]} is missing"
    return text


def _as_list(value: Any) -> str:
    """Write a text as the list that was meant; "" if it is none, or must not be shown."""
    shown = _not(value)
    return f"{shown}; write [{value}]" if isinstance(value, str) and shown else ""


def _not(value: Any) -> str:
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    if isinstance(value, int | float):
        return f", not {value:g}" if isinstance(value, float) else f", not {value}"
    if isinstance(value, str):
        short = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…"
        return f", not {short!r}"
    return ""


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
