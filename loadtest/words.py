"""Numbers, shares and times as people read them; `-` for what is not known.

What statistics say in words (estimates, comparisons) is in `loadtest.statistics.words`.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime


def milliseconds(seconds: float | None) -> str:
    """Write a time in whole milliseconds."""
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def duration(seconds: float | None) -> str:
    """Write a time with three digits: 840 µs, 3.2 ms, 1.25 s."""
    if seconds is None:
        return "-"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        value = seconds * factor
        if round(value) < 1000:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "µs" else f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def time_span(seconds: float) -> str:
    """Write a long time in one unit: 90 s, 12 min, 3.5 h, 4 days."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            digits = 0 if seconds >= 10 * size else 1
            return f"{seconds / size:,.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def clock(seconds: float) -> str:
    """Write a time as hours, minutes and seconds: 0:42, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def moment(at_s: float) -> str:
    """Write a unix time in UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def ratio(share: float | None) -> str:
    """Write a share with one digit behind the point: 83.4%."""
    return "-" if share is None else f"{share:.1%}"


def percent(share: float) -> str:
    """Write a share with two digits that count: 12 %, 1.2 %, 0.12 %."""
    value = 100 * share
    if value and abs(value) < 10:
        digits = min(3, max(0, 1 - math.floor(math.log10(abs(value)))))
        return f"{value:.{digits}f} %"
    return f"{value:,.0f} %"


def signed(share: float) -> str:
    """Write hundred times a share with its sign."""
    value = 100 * share
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2
    return f"{value:+,.{digits}f}"


def thousands(count: int) -> str:
    """Write a token count: 812, 12.3K, 412K, 1.43M."""
    if count < 1000:
        return str(count)
    if count < 1_000_000:
        return f"{count / 1e3:.1f}K" if count < 99_950 else f"{count / 1e3:.0f}K"
    return f"{count / 1e6:.2f}M"


def amount(value: float | None, unit: str) -> str:
    """Write a value with its unit; `%` for a share."""
    if value is None:
        return "-"
    if unit == "%":
        return percent(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def three_digits(value: float) -> str:
    """Write three digits that count, none behind the point from 100 on."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
