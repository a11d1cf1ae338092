"""What compare knows of a run beyond its turns; kept in the run file's settings."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.compare.busy import Busy
from loadtest.results import Run

POSITION, COLD, SHARED = "position", "cold", "shares_caches"
_BUSY, _STOLEN, _LOAD = "busy_share", "stolen_share", "load_average"


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
