"""How busy the machine was during a run, by its own account (Linux; elsewhere nothing is said)."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

_STAT = Path("/proc/stat")


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
