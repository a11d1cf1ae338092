"""Until when an engine's date holds, by what it said its date was.

An engine's date is its local one: it changes at a midnight of its time zone, which is not known.
Each date that it says rules out the zones in which it was another one; what is left tells when its
next midnight may be. A date that no zone had at that time is pinned (VLLM_SYSTEM_START_DATE).
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Final

_STEP: Final = timedelta(minutes=15)
_OFFSETS: Final = tuple(_STEP * number for number in range(-12 * 4, 14 * 4 + 1))
_DAYLIGHT_SAVING: Final = tuple(timedelta(minutes=minutes) for minutes in (-60, -30, 0, 30, 60))


class EngineClock:
    """One engine's clock; times are UTC."""

    __slots__ = ("_offsets",)

    def __init__(self) -> None:
        self._offsets = _OFFSETS

    def observe(self, said: date, now: datetime) -> None:
        """Note that the engine's date was `said`."""
        for known in (self._offsets, _OFFSETS):  # its zone may have changed: summer time
            self._offsets = tuple(o for o in known if (now + o).date() == said)
            if self._offsets:
                return

    def next_midnight(self, now: datetime) -> datetime | None:
        """Return the first time after `now` at which its date may change; None: it is pinned."""
        zones = {offset + change for offset in self._offsets for change in _DAYLIGHT_SAVING}
        return min((_midnight(now + zone) - zone for zone in zones), default=None)


def _midnight(local: datetime) -> datetime:
    return local.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
