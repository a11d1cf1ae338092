"""Whole sessions: how long each took, from its first request to its last answer.

That is what an agent's user waits for. A session has its sub-agents in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from loadtest.results import TurnResult, percentile


class Whole(Struct, frozen=True, gc=False):
    """One session: its time in seconds, waits between its turns included, and its turns."""

    took_s: float
    num_turns: int


class SessionTimes(Struct, frozen=True, kw_only=True):
    """The times of the whole sessions of some runs, in seconds."""

    num_sessions: int
    mean_s: float
    p99_s: float
    longest_s: float


def session_times(runs: Iterable[Sequence[TurnResult]]) -> SessionTimes | None:
    """Sum up the whole sessions of runs of one variant; None: there is none."""
    took_s = sorted(whole.took_s for turns in runs for whole in whole_sessions(turns).values())
    if not took_s:
        return None
    return SessionTimes(
        num_sessions=len(took_s),
        mean_s=fmean(took_s),
        p99_s=percentile(took_s, 0.99),
        longest_s=took_s[-1],
    )


def whole_sessions(turns: Iterable[TurnResult]) -> dict[str, Whole]:
    """Measure each session by its id; one with a failed turn did not end, and is left out."""
    counted = [turn for turn in turns if not turn.is_warm_up]
    root_of = roots({turn.session_id for turn in counted})
    found: dict[str, list[TurnResult]] = {}
    for turn in counted:
        found.setdefault(root_of[turn.session_id], []).append(turn)
    return {
        root: Whole(max(map(_end_s, of_it)) - min(map(_begin_s, of_it)), len(of_it))
        for root, of_it in found.items()
        if all(turn.error is None for turn in of_it)
    }


def roots(session_ids: Iterable[str]) -> dict[str, str]:
    """Return the session that each one descends from; its own id if it is no sub-agent.

    Sub-agents are named after their parents (`s3.2.0` is one of `s3`). A dot is not enough:
    the part before it must be a session too.
    """
    known = set(session_ids)
    return {session_id: _root(session_id, known) for session_id in known}


def _root(session_id: str, known: Mapping[str, object] | set[str]) -> str:
    at = session_id.find(".")
    while at != -1:
        if session_id[:at] in known:
            return session_id[:at]
        at = session_id.find(".", at + 1)
    return session_id


def _begin_s(turn: TurnResult) -> float:
    return turn.start_s if turn.due_s is None else turn.due_s


def _end_s(turn: TurnResult) -> float:
    return _begin_s(turn) + turn.total_s
