"""A finding: a part of a system, its condition, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Level = Literal["ok", "note", "warning", "error"]
"""`ok`: in good order. `note`: it could be better, or is not known. `warning`: the router works,
but with less knowledge than it could have. `error`: something will not work."""


class Finding(Struct, frozen=True):
    """The condition of one part of a system.

    `subject` is the system: "replica r1", "redis", "pool", "router". `about` is the part.
    """

    subject: str
    about: str
    level: Level
    text: str
    hint: str = ""  # what to do, with the flag; empty: nothing


class Subject(Struct, frozen=True):
    """Creates the findings of one subject."""

    name: str

    def ok(self, about: str, text: str) -> Finding:
        return Finding(self.name, about, "ok", text)

    def note(self, about: str, text: str, hint: str = "") -> Finding:
        return Finding(self.name, about, "note", text, hint)

    def warning(self, about: str, text: str, hint: str = "") -> Finding:
        return Finding(self.name, about, "warning", text, hint)

    def error(self, about: str, text: str, hint: str = "") -> Finding:
        return Finding(self.name, about, "error", text, hint)


def gravest(findings: Sequence[Finding]) -> Level:
    """Return the gravest level among findings."""
    levels: tuple[Level, ...] = ("error", "warning", "note")
    return next((level for level in levels if any(f.level == level for f in findings)), "ok")


def size(num_bytes: int) -> str:
    """Write a size in three digits."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
