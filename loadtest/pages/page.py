"""The parts of a report, and their rendering. Text is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from jinja2 import Environment, StrictUndefined
from msgspec import Struct

Tone = Literal["good", "bad", "warning", "soft", ""]

_TEMPLATE: Final = Path(__file__).with_name("page.html.jinja")


class Note(Struct, frozen=True, kw_only=True, tag="note"):
    """A paragraph; `good` and `bad` are verdicts, `warning` is what limits them."""

    text: str
    kind: Literal["plain", "good", "bad", "warning"] = "plain"


class Table(Struct, frozen=True, kw_only=True, tag="table"):
    """Cells as text; numbers are right-aligned by `numeric` columns (indices).

    `tones` gives each row's cell in column `toned` a colour; both or neither are given.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: tuple[int, ...] = ()
    tones: tuple[Tone, ...] = ()
    toned: int | None = None

    def tone(self, row: int, column: int) -> str:
        """Name a cell's colour; "" for none."""
        return self.tones[row] if column == self.toned else ""


class Section(Struct, frozen=True, kw_only=True):
    """A heading and what is under it."""

    title: str
    parts: tuple[Note | Table, ...]


class Page(Struct, frozen=True, kw_only=True):
    """A report. `lead` is its answer, in one or two sentences."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""  # how it was made: command, versions, machine


def render(page: Page) -> str:
    """Write the page as one HTML document."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=page, is_table=lambda part: isinstance(part, Table))
