"""Reports: self-contained HTML pages, and the same tables on a terminal.

This package knows how a report looks, not what it says.
"""

from loadtest.pages.page import Note, Page, Section, Table, Tone, render
from loadtest.pages.terminal import bullets, on_terminal

__all__ = [
    "Note",
    "Page",
    "Section",
    "Table",
    "Tone",
    "bullets",
    "on_terminal",
    "render",
]
