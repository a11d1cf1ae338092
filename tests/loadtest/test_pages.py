"""loadtest.pages: reports are one file, and say nothing that was not meant."""

from __future__ import annotations

from loadtest.pages import Note, Page, Section, Table, render

PAGE = Page(
    title="a < b",
    lead="kv_aware & others",
    sections=(
        Section(
            title="What came out",
            parts=(
                Note(text="<script>alert(1)</script>", kind="warning"),
                Table(head=("policy", "s"), rows=(("a", "1.0"), ("b", "2.0")), numeric=(1,)),
            ),
        ),
    ),
    footer="made by hand",
)


def test_everything_is_there_and_escaped() -> None:
    """Text is text, whatever it looks like."""
    html = render(PAGE)

    assert "<h1>a &lt; b</h1>" in html
    assert "kv_aware &amp; others" in html
    assert '<p class="warning">&lt;script&gt;' in html
    assert '<td>a</td><td class="number">1.0</td>' in html
    assert "<footer>made by hand</footer>" in html
