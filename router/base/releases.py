"""Which releases of vLLM follow other rules than the one before, for what events do not show.

What must live here: reading a version. What must not: the rules; each is where it is applied.
"""

from __future__ import annotations

import re
from typing import Final

Release = tuple[int, int]

V0_32: Final[Release] = (0, 32)
V0_33: Final[Release] = (0, 33)


def is_at_least(version: str | None, release: Release) -> bool:
    """Return whether a version is of this release or a later one; False: it is not known."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= release


def rules_of(version: str | None) -> Release:
    """Return the release whose rules a prompt is made by."""
    return V0_33 if is_at_least(version, V0_33) else V0_32


def in_order(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to be compared with those of others."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:3])
