"""router.check.report and finding: a report for people and for machines."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from router.check.finding import Finding, Level, gravest, size
from router.check.report import Report, render
from tests.check.samples import POOL, REDIS, REPLICA


def finding(level: Level, subject: str = "redis") -> Finding:
    return Finding(subject, "about", level, f"it is {level}", f"do {level}")


def rendered(*findings: Finding) -> str:
    out = io.StringIO()
    render(Report(findings=findings), Console(file=out, width=100))
    return out.getvalue()


def test_findings_are_shown_by_subject_with_their_hints() -> None:
    """A subject's mark is that of its gravest finding."""
    text = rendered(finding("ok"), finding("warning"), finding("error", "router"), finding("note"))

    assert [line.rstrip() for line in text.splitlines() if line and line[0] != " "] == [
        "! redis",
        "✗ router",
        "1 error, 1 warning, 1 note",
    ]
    assert "→ do warning" in text
    assert "→ do note" in text
    assert "do ok" not in text


def test_the_last_line_counts_the_findings() -> None:
    assert rendered(finding("ok")).endswith("all is well\n")
    assert rendered(finding("note")).endswith("all is well (1 note)\n")
    assert rendered(finding("warning")).endswith("1 warning\n")


def test_text_is_shown_as_it_is() -> None:
    """Brackets are not markup: hints are copied."""
    text = rendered(Finding("redis", "x", "error", "[red]a[/red]", '{"b": [1]}'))

    assert "[red]a[/red]" in text
    assert '{"b": [1]}' in text


def test_a_report_with_notes_only_is_well() -> None:
    assert Report(findings=(finding("ok"), finding("note"))).is_well
    assert not Report(findings=(finding("warning"),)).is_well
    assert not Report(findings=(finding("error"),)).is_well
    assert gravest([]) == "ok"


def test_a_report_survives_json() -> None:
    report = Report(findings=(finding("ok"),), replicas=(REPLICA,), redis=REDIS, pools=(POOL,))

    report_json = json.loads(json.dumps(report.as_json()))

    assert report_json["well"] is True
    assert report_json["findings"][0]["text"] == "it is ok"
    assert report_json["replicas"][0]["facts"]["version"] == "0.32.0"
    assert report_json["redis"]["followed"] == ["one"]
    assert report_json["pools"][0]["models"][0]["layout"]["text"] == "qwen@tp_rank:0-1"
    assert msgspec.convert(report_json, Report, strict=False) == report


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB")],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
