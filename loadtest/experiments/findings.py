"""A finding: something that limits a report's claim, or breaks it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Weight = Literal["broken", "warning", "note"]


class Finding(Struct, frozen=True, kw_only=True):
    """`broken`: do not trust any difference; `warning`: it may mislead; `note`: information."""

    weight: Weight
    code: str  # for machines: does not change
    text: str


def broken(code: str, text: str) -> Finding:
    return Finding(weight="broken", code=code, text=text)


def warning(code: str, text: str) -> Finding:
    return Finding(weight="warning", code=code, text=text)


def note(code: str, text: str) -> Finding:
    return Finding(weight="note", code=code, text=text)
