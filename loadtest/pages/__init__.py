"""Self-contained HTML reports: one file, no script, nothing loaded from anywhere.

What must live here: how a report looks. What must not: what it says.
"""

from loadtest.pages.page import Figure, Note, Page, Section, Table, Tone, render

__all__ = ["Figure", "Note", "Page", "Section", "Table", "Tone", "render"]
