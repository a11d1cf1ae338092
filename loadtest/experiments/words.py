"""Numbers as people read them; nothing is decided here."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from loadtest.experiments.metrics import Metric

if TYPE_CHECKING:  # bootstrap stands on records, which tell times in words
    from loadtest.experiments.bootstrap import Interval

_PARTS = {"split": "session", "partition": "session", "switchback": "slot"}


def unit_noun(design: str, num: int = 1) -> str:
    """Name what was randomised."""
    noun = _PARTS.get(design, "unit")
    return noun if num == 1 else f"{noun}s"


def percent(share: float) -> str:
    """Write a share: two digits that count, 12 %, 1.2 %, 0.12 %."""
    value = 100 * share
    if value and abs(value) < 10:
        digits = min(3, max(0, 1 - math.floor(math.log10(abs(value)))))
        return f"{value:.{digits}f} %"
    return f"{value:,.0f} %"


def amount(value: float | None, unit: str) -> str:
    """Write a value of a metric with its unit."""
    if value is None:
        return "-"
    if unit == "%":
        return percent(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def interval(found: Interval, unit: str) -> str:
    """Write a value and its interval."""
    if found.value is None:
        return "-"
    if found.low is None or found.high is None:
        return amount(found.value, unit)
    low, high = (amount(v, unit).removesuffix(f" {unit}") for v in (found.low, found.high))
    return f"{amount(found.value, unit)} ({low} to {high})"


def change(found: Interval, metric: Metric) -> str:
    """Write a difference to the baseline with its sign and interval."""
    if found.value is None:
        return "-"
    unit = "%" if metric.is_relative else "points"
    text = f"{signed(found.value)} {unit}"
    if found.low is None or found.high is None:
        return text
    return f"{text} ({signed(found.low)} to {signed(found.high)})"


def signed(share: float) -> str:
    """Write hundred times a share with its sign."""
    value = 100 * share
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2
    return f"{value:+,.{digits}f}"


def duration(seconds: float) -> str:
    """Write a time span in one unit."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return (
                f"{seconds / size:,.0f} {unit}"
                if seconds >= 10 * size
                else (f"{seconds / size:.1f} {unit}")
            )
    return f"{seconds:.0f} s"


def clock(at_s: float) -> str:
    """Write a unix time in UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
