"""What compare records of a run beyond its turns, in the settings of the run file."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.results import Run

POSITION, COLD, SHARED = "position", "cold", "shares_caches"


def annotate(run: Run, *, position: int, cold: str, shares_caches: bool) -> Run:
    """Record a run's place in the whole order, and how its caches were made cold.

    Args:
        shares_caches: Other runs used the same caches, so each run must send its own bytes.
    """
    noted = {POSITION: position, COLD: cold, SHARED: shares_caches}
    return replace(run, info=replace(run.info, settings={**run.info.settings, **noted}))


def late_p99_s(run: Run) -> float:
    """Return how late the driver sent, at its P99; 0.0 if nothing was sent."""
    late = sorted(turn.late_s for turn in run.turns)
    return late[int(0.99 * (len(late) - 1))] if late else 0.0
