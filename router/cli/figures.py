"""Figures that several commands write: durations, shares, tokens that were computed again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

_WELL: Final = ("cached", "new", "last_block")
"""Tokens of these causes are as they should be."""

_MAX_NAME: Final = 24  # of a session
_BAR: Final = 6  # characters
_SHORT_MS: Final = 100.0  # a wait that nobody asks about


def again(tokens: Mapping[str, int] | None) -> dict[str, int]:
    """Select the tokens that were computed again, by cause, the largest first."""
    found = [(cause, num) for cause, num in (tokens or {}).items() if num and cause not in _WELL]
    return dict(sorted(found, key=lambda pair: -pair[1]))


def listed(tokens: Mapping[str, int]) -> str:
    """Write tokens by cause, as in `evicted 1,024, moved 64`."""
    return ", ".join(f"{cause} {num:,}" for cause, num in tokens.items())


def share(part: float, whole: float) -> str:
    """Write a share in percent; "-": there is no whole."""
    return f"{part / whole:.0%}" if whole else "-"


def bar(ratio: float | None) -> str:
    """Draw a ratio as a bar with its number, without a space; "-": it is not known."""
    if ratio is None:
        return "-"
    full = round(min(1.0, max(0.0, ratio)) * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)}{ratio:.0%}"


def cell_of_duration(ms: float | None) -> str:
    """Write a duration without a space; "-": it is not known."""
    if ms is None:
        return "-"
    return f"{ms:,.0f}ms" if ms < 1000 else f"{ms / 1000:,.1f}s"


def waiting(line: Mapping[str, Any]) -> str:
    """Write how a request waits, as `WaitingRoom.describe` has it."""
    return (
        f"request {line['request']} waits for {line['for'] or 'its turn'}: "
        f"{line['waited_s']:,.0f} s so far, {num(line['before'], 'request')} before it, "
        f"first in {line['late_s']:,.0f} s at the latest"
    )


def waited(line: Mapping[str, Any]) -> str:
    """Write what a finished request waited for; empty: it waited for less than 0.1 s."""
    is_long = line["waited_for"] is not None and line["waited_ms"] >= _SHORT_MS
    return f"waited for {line['waited_for']}" if is_long else ""


def cell_of_name(name: str | None) -> str:
    """Write a name without a space, as a cell of a table; "-": there is none."""
    return "_".join(name.split()) if name else "-"


def titles(state: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the clients' own ids of sessions, by ours; empty: they are not shown."""
    found: Mapping[str, str] = state["sessions"].get("titles", {})
    return found


def session_name(name: str | None, names: Mapping[str, str]) -> str:
    """Return what a session is called, as a cell of a table."""
    title = cell_of_name(names.get(name or "", name or ""))
    return title if len(title) <= _MAX_NAME else f"{title[: _MAX_NAME - 1]}…"


def money(amount: float | None) -> str:
    """Write an amount of money; "-": no price is known."""
    if amount is None:
        return "-"
    if 0 < amount < 0.0001:
        return "<0.0001"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.4f}"


def age(seconds: float) -> str:
    """Write how long something has run, in its largest unit."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def clock(unix_s: float) -> str:
    """Write a time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def num(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
