"""Make a workload of what a file says: sessions, order, waits.

1. Requests without a session get one from what they share (`sessions_of`).
2. Arrivals are spread if asked. In a session that the file names, no turn arrives before the
   one before it in the file; others are put in order of arrival.
3. A turn without a time arrives when the one before it would be done and its wait over.
4. A turn comes after the one before it in its session unless the file says otherwise. It
   waits as long as `delay` says. Without `delay` it waits for the gap between the two, less
   the estimated time of the turn before (`service_s`).
5. All turns in order of arrival, ties as in the file; the first one arrives at 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from loadtest.timing import Timing, offsets_of, poisson, scaled, service_s, tool_waits
from loadtest.traces.errors import WorkloadError
from loadtest.traces.request import Draft
from loadtest.traces.sessions import sessions_of
from loadtest.workload import Turn, TurnKey, Workload


class _Placed(Struct, frozen=True):
    """A draft whose session is known."""

    index: int  # in the file
    session_id: str
    is_named: bool  # by the file
    arrival_s: float | None
    draft: Draft


def build(
    drafts: Sequence[Draft],
    *,
    name: str,
    block_size: int,
    timing: Timing,
    num_skipped: int = 0,
) -> Workload:
    """Make a workload of what a reader took from a file.

    Raises:
        WorkloadError: A turn is to come after one that does not exist or arrives later.
    """
    waits = tool_waits(random.Random(f"{timing.seed}/waits"))
    starts = poisson(timing.rate, random.Random(f"{timing.seed}/starts"))
    built: list[tuple[float, int, Turn]] = []
    by_key: dict[TurnKey, Turn] = {}
    for session in _sessions(_place(drafts, timing)):
        before: Turn | None = None
        for placed in session:
            turn = before = _turn(placed, before, by_key, block_size, starts, waits)
            by_key[turn.key] = turn
            built.append((turn.arrival_s, placed.index, turn))
    built.sort(key=lambda item: item[:2])
    workload = Workload(
        name=name,
        block_size=block_size,
        turns=tuple(_moved(turn, built[0][0]) for _, _, turn in built),
        num_skipped=num_skipped,
    )
    _check_order(workload)
    return scaled(workload, timing.scale_time)


def _place(drafts: Sequence[Draft], timing: Timing) -> Iterator[_Placed]:
    """Name sessions and spread arrivals."""
    nameless = [index for index, draft in enumerate(drafts) if draft.session_id is None]
    derived = sessions_of([drafts[index] for index in nameless])
    names = {index: f"s{nameless[root]}" for index, root in zip(nameless, derived, strict=True)}
    offsets = offsets_of(timing.spread_s, timing.seed)
    for index, draft in enumerate(drafts):
        known_s = draft.timestamp_ms
        yield _Placed(
            index,
            names.get(index) or draft.session_id or "",
            draft.session_id is not None,
            None if known_s is None else known_s / 1000.0 + next(offsets),
            draft,
        )


def _sessions(placed: Iterator[_Placed]) -> Iterator[list[_Placed]]:
    """Gather the turns of each session in their order."""
    sessions: dict[tuple[bool, str], list[_Placed]] = {}
    for one in placed:
        sessions.setdefault((one.is_named, one.session_id), []).append(one)
    for session in sessions.values():
        if not session[0].is_named:
            session.sort(key=lambda one: one.arrival_s or 0.0)
        yield session


def _turn(
    placed: _Placed,
    before: Turn | None,
    by_key: dict[TurnKey, Turn],
    block_size: int,
    starts: Iterator[float],
    waits: Iterator[float],
) -> Turn:
    draft = placed.draft
    after = draft.after
    if after is None:
        after = (before.key,) if before else ()
    done_s = max((_done_s(key, by_key, block_size) for key in after), default=0.0)
    arrival_s, wait_s = placed.arrival_s, 0.0
    if draft.delay_ms is not None and after:
        wait_s = draft.delay_ms / 1000.0
    elif arrival_s is not None and after:
        wait_s = max(0.0, arrival_s - done_s)
    elif after:
        wait_s = next(waits)
    if arrival_s is None:
        arrival_s = done_s + wait_s if after else next(starts)
    return Turn(
        session_id=placed.session_id,
        number=before.number + 1 if before else 0,
        arrival_s=max(arrival_s, before.arrival_s) if before else arrival_s,
        num_input_tokens=draft.num_input_tokens,
        num_output_tokens=max(1, draft.num_output_tokens),
        hash_ids=draft.hash_ids,
        after=after,
        wait_s=wait_s,
        messages=draft.messages,
        tools=draft.tools,
    )


def _done_s(key: TurnKey, by_key: dict[TurnKey, Turn], block_size: int) -> float:
    """Estimate when a turn is done; 0.0 where it is not known yet."""
    turn = by_key.get(key)
    if turn is None:
        return 0.0
    before = by_key.get(turn.after[0]) if turn.after else None
    num_shared = num_common(turn.hash_ids, before.hash_ids) * block_size if before else 0
    num_uncached = max(0, turn.num_input_tokens - num_shared)
    return turn.arrival_s + service_s(num_uncached, turn.num_output_tokens)


def num_common(ids: Sequence[object], others: Sequence[object]) -> int:
    """Count the leading ids that two prompts have in common."""
    count = 0
    for one, other in zip(ids, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def _moved(turn: Turn, start_s: float) -> Turn:
    if start_s == 0.0:
        return turn
    return replace(turn, arrival_s=turn.arrival_s - start_s)


def _check_order(workload: Workload) -> None:
    seen: set[TurnKey] = set()
    for turn in workload.turns:
        for key in turn.after:
            if key not in seen:
                raise WorkloadError(
                    f"{workload.name}: session {turn.session_id}, turn {turn.number}: after: "
                    f"{list(key)} is unknown or arrives later; allowed: turns that arrive earlier"
                )
        seen.add(turn.key)
