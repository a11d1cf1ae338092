"""What compare records of a run beyond its turns, in the settings of the run file.

How busy the machine was comes from /proc/stat; on other systems than Linux it is not recorded.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from loadtest.results import Run

_STAT = Path("/proc/stat")
POSITION, COLD, SHARED = "position", "cold", "shares_caches"
_BUSY, _STOLEN, _LOAD = "busy_share", "stolen_share", "load_average"


class Ticks(Struct, frozen=True, kw_only=True):
    """Processor time of all CPUs since boot, in ticks."""

    total: int
    idle: int
    stolen: int  # taken by the host for its other guests


class Busy(Struct, frozen=True, kw_only=True):
    """What became of the processor time of a run; shares in [0, 1]."""

    busy_share: float
    stolen_share: float
    load_average: float  # over a minute, at the end


def read_ticks() -> Ticks | None:
    """Read the counters; None where there are none."""
    try:
        return parse_ticks(_STAT.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def parse_ticks(text: str) -> Ticks | None:
    """Read the first line of /proc/stat.

    Source: proc_stat(5): user nice system idle iowait irq softirq steal guest guest_nice, where
    guest times are part of user and nice already.
    """
    fields = text.partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[1:9])
    return Ticks(
        total=user + nice + system + idle + iowait + irq + softirq + steal,
        idle=idle + iowait,
        stolen=steal,
    )


def measure(before: Ticks | None, after: Ticks | None) -> Busy | None:
    """Compare two readings; None: there was none, or no time passed."""
    if before is None or after is None or after.total <= before.total:
        return None
    passed = after.total - before.total
    return Busy(
        busy_share=1 - (after.idle - before.idle) / passed,
        stolen_share=(after.stolen - before.stolen) / passed,
        load_average=os.getloadavg()[0],
    )


def annotate(run: Run, *, position: int, cold: str, shares_caches: bool, busy: Busy | None) -> Run:
    """Note a run's place in the whole order, how caches were made cold, how busy it was.

    Args:
        shares_caches: Other runs used the same caches: this one must bring bytes of its own.
    """
    noted: dict[str, str | int | float | bool] = {
        POSITION: position,
        COLD: cold,
        SHARED: shares_caches,
    }
    if busy is not None:
        noted |= {
            _BUSY: round(busy.busy_share, 4),
            _STOLEN: round(busy.stolen_share, 4),
            _LOAD: round(busy.load_average, 2),
        }
    return replace(run, info=replace(run.info, settings={**run.info.settings, **noted}))


def busy_of(run: Run) -> Busy | None:
    """Read back how busy the machine was; None: not noted."""
    settings = run.info.settings
    if _BUSY not in settings:
        return None
    return Busy(
        busy_share=float(settings[_BUSY]),
        stolen_share=float(settings.get(_STOLEN, 0.0)),
        load_average=float(settings.get(_LOAD, 0.0)),
    )


def late_p99_s(run: Run) -> float:
    """How late the driver sent, at its P99; 0.0 where nothing was sent."""
    late = sorted(turn.late_s for turn in run.turns)
    return late[int(0.99 * (len(late) - 1))] if late else 0.0
