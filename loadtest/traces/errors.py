"""Errors of a workload: a line of its file, or all of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are none: the last for brackets without end."""

_FIELD: Final = re.compile(r"`\$\.?(\w+)?[^`]*`")
_SHOWN_BELOW: Final = 1e24
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


class WorkloadError(ValueError):
    """A workload cannot be read; the message names the file, the line and the field."""


class BadLine(ValueError):
    """One line of a trace is wrong; the others may be good.

    Args:
        field: The field, None where the whole line is wrong.
        problem: What it is and what is allowed; never what a prompt says.
    """

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


def decoded(decoder: msgspec.json.Decoder[T], raw: bytes, allowed: Mapping[str, str]) -> T:
    """Decode one line.

    Raises:
        BadLine: It is not of this format; names the field and what is allowed there.
    """
    try:
        return decoder.decode(raw)
    except NOT_JSON as error:
        raise _bad_line(error, allowed) from error


def _bad_line(error: Exception, allowed: Mapping[str, str]) -> BadLine:
    """Describe which field a decoder failed at, and what the format allows there."""
    text = str(error)
    if missing := _MISSING.search(text):
        return BadLine(missing[1], f"missing; allowed: {allowed.get(missing[1], 'any')}")
    found = _FIELD.search(text)
    field = found[1] if found else None
    if not isinstance(error, msgspec.ValidationError) and "malformed" not in text:
        text = f"JSON is malformed: {text}"
    if field is None:
        return BadLine(None, text)
    problem = text.split(" - at ")[0]
    return BadLine(field, f"{problem}; allowed: {allowed.get(field, 'any')}")


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Refuse a number that is too small or too large.

    Raises:
        BadLine: It is; the message has the number and the range.
    """
    if not low <= value <= high:
        shown = f"{value:,}" if abs(value) < _SHOWN_BELOW else "an enormous number"
        raise BadLine(field, f"{shown} is out of range; allowed: {low:,} to {high:,}")
