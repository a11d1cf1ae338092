"""Reports: self-contained HTML pages, and the same tables on a terminal.

What must live here: how a report looks. What must not: what it says.
"""

from loadtest.pages.page import Figure, Note, Page, Section, Table, Tone, render
from loadtest.pages.terminal import bullets, on_terminal

__all__ = [
    "Figure",
    "Note",
    "Page",
    "Section",
    "Table",
    "Tone",
    "bullets",
    "on_terminal",
    "render",
]
