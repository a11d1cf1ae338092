"""Estimates and comparisons in words."""

from __future__ import annotations

from loadtest.statistics.comparison import Comparison
from loadtest.words import ratio, three_digits


def figures(found: Comparison) -> tuple[str, ...]:
    """Write a comparison's cells: theirs, ours, effect, interval, range of the rounds."""
    return (
        value(found.unit, found.theirs),
        value(found.unit, found.ours),
        effect(found),
        bounds(found),
        round_range(found) if len(found.rounds) > 1 else "-",
    )


def effect(found: Comparison) -> str:
    """Write a ratio as × 0.83, a difference of times with its sign and unit."""
    return _write(found, found.effect)


def bounds(found: Comparison) -> str:
    """Write the interval."""
    return f"{_write(found, found.low, bare=True)} to {_write(found, found.high, bare=True)}"


def round_range(found: Comparison) -> str:
    """Write the lowest and the highest round."""
    ends = (min(found.rounds), max(found.rounds))
    return " to ".join(_write(found, end, bare=True) for end in ends)


def value(measure_unit: str, amount: float | None) -> str:
    """Write a figure of a variant with its unit; `-` for none."""
    if amount is None:
        return "-"
    match measure_unit:
        case "s":
            return f"{amount:,.2f} s" if amount >= 10 else f"{three_digits(amount * 1e3)} ms"
        case "share":
            return ratio(amount)
        case _:
            return f"{amount:,.0f}"


def _write(found: Comparison, amount: float, *, bare: bool = False) -> str:
    if found.kind == "ratio" and amount >= 1000:
        return "> 1,000"
    if found.kind == "ratio":
        return f"{amount:.2f}" if bare else f"× {amount:.2f}"
    sign = "+" if amount > 0 else "−" if amount < 0 else "±"
    size = abs(amount)
    if max(abs(found.low), abs(found.high), abs(found.effect)) >= 10:
        return f"{sign}{size:,.2f}" + ("" if bare else " s")
    return f"{sign}{three_digits(size * 1e3)}" + ("" if bare else " ms")
