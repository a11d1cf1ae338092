"""How numbers, shares, times and comparisons are written."""

from __future__ import annotations

import pytest

from loadtest.statistics import words
from loadtest.words import clock, duration, milliseconds, percent, ratio, thousands, time_span


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (812, "812"), (12_345, "12.3K"), (99_960, "100K"), (412_400, "412K"),
     (1_430_000, "1.43M")],
)  # fmt: skip
def test_token_counts_are_short(count: int, text: str) -> None:
    """Counts take at most five characters."""
    assert thousands(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.00084, "840 µs"), (0.0032, "3.2 ms"), (0.9996, "1 s"), (0.25, "250 ms"),
     (12.345, "12.3 s"), (4000.0, "4,000 s")],
)  # fmt: skip
def test_times_are_written_short(seconds: float | None, text: str) -> None:
    """Three digits and a unit."""
    assert duration(seconds) == text


def test_clocks_and_shares() -> None:
    """Hours only where there are any."""
    assert [clock(42), clock(725), clock(3723)] == ["0:42", "12:05", "1:02:03"]
    assert [ratio(None), ratio(0.8345)] == ["-", "83.5%"]
    assert [milliseconds(None), milliseconds(1.2345)] == ["-", "1,234 ms"]
    assert [time_span(s) for s in (90, 5_400, 90_000, 864_000)] == [
        "90 s",
        "90 min",
        "25 h",
        "10 days",
    ]
    assert [percent(s) for s in (0.12, 0.012, 0.0012)] == ["12 %", "1.2 %", "0.12 %"]


def test_figures_are_written_readably() -> None:
    """Milliseconds with three digits, seconds from ten on."""
    assert words.value("s", 0.0123) == "12.3 ms"
    assert words.value("s", 1.5) == "1,500 ms"
    assert words.value("s", 12.0) == "12.00 s"
    assert words.value("share", 0.5) == "50.0%"
    assert words.value("tokens", 1234.4) == "1,234"
    assert words.value("s", None) == "-"
