"""Which turn comes next, and when: open loop and closed loop, without a clock.

    open      every turn at its arrival, whatever became of the others
    closed    a turn `wait_s` after the last turn that it comes `after` is done, well or badly

A turn that waits for no other is sent at its arrival, but only if its session may run:
`concurrency` sessions run at once, each with its sub-agents. Ask `next_due`, wait until then or
until a turn is done, then `take` the turn that is due, and call `finish` when it is done. Seconds
count from the start of the replay.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from loadtest.runner.options import ReplayError
from loadtest.workload import Turn, Workload


class Entry(Struct, frozen=True, order=True, gc=False):
    """A turn and when to send it; `index` is its place in the workload."""

    due_s: float
    index: int


def make_schedule(
    workload: Workload, *, closed: bool, scale_time: float, concurrency: int | None
) -> Schedule:
    """Choose between open and closed loop; arrival and wait times are multiplied."""
    if closed:
        return Schedule(workload.turns, scale_time, concurrency)
    return Schedule([replace(turn, after=()) for turn in workload.turns], scale_time)


def time_scale(workload: Workload, rate: float | None) -> float:
    """Turn a rate (requests a second) into a multiple of the arrival times; None: 1.

    Raises:
        ReplayError: a rate, where the workload's turns arrive all at once.
    """
    if rate is None:
        return 1.0
    if workload.span_s <= 0:
        raise ReplayError(
            f"the {len(workload.turns)} turns of {workload.name} arrive all at once: "
            "there is no rate to scale"
        )
    return (len(workload.turns) - 1) / rate / workload.span_s


class Schedule:
    """Decides about times; the turns themselves are the workload's.

    A family is all sessions that wait for one another: a session and its sub-agents. It keeps
    its place until its last turn is done, so no turn waits for a turn that may not start.

    Args:
        turns: In order of arrival; the first one is due at 0.
        scale: Factor for arrival and wait times.
        concurrency: Families that run at once; None: all.
    """

    __slots__ = ("_families", "_family_of", "_followers", "_heap", "_num_free", "_num_left",
                 "_num_missing", "_ready_s", "_scale", "_turns", "_waiting")  # fmt: skip

    def __init__(self, turns: Sequence[Turn], scale: float, concurrency: int | None = None) -> None:
        self._turns = turns
        self._scale = scale
        self._num_left = len(turns)
        self._num_free = len(turns) if concurrency is None else concurrency
        self._heap: list[Entry] = []
        places = {turn.key: index for index, turn in enumerate(turns)}
        self._num_missing = [len(turn.after) for turn in turns]
        self._followers: dict[int, list[int]] = {}
        for index, turn in enumerate(turns):
            for key in turn.after:
                self._followers.setdefault(places[key], []).append(index)
        self._family_of = _families(turns)
        self._families: dict[int, _Family] = {}
        for index, family in enumerate(self._family_of):
            members = self._families.setdefault(family, _Family())
            members.num_left += 1
            if not turns[index].after:
                members.roots.append(index)
        self._waiting = deque(self._families.values())  # in order of their first turns
        first_s = turns[0].arrival_s if turns else 0.0
        self._ready_s = -first_s * scale
        self._admit(0.0)

    @property
    def num_left(self) -> int:
        """Count the turns that were not taken yet."""
        return self._num_left

    def next_due(self) -> float | None:
        """Return when the next turn is due; None: when another is done, or never again."""
        return self._heap[0].due_s if self._heap else None

    def upcoming(self, count: int) -> Sequence[int]:
        """List the places of about the next turns, as far as known now, the first one first."""
        # The top of the heap, not its smallest entries: this is asked at every turn.
        return [entry.index for entry in sorted(self._heap[: 2 * count])[:count]]

    def take(self) -> Entry:
        """Remove and return the turn that is due next; only if `next_due` names a time."""
        self._num_left -= 1
        return heapq.heappop(self._heap)

    def finish(self, index: int, now_s: float) -> None:
        """Record that a turn is done."""
        for follower in self._followers.get(index, ()):
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                wait_s = self._turns[follower].wait_s * self._scale
                heapq.heappush(self._heap, Entry(now_s + wait_s, follower))
        family = self._families[self._family_of[index]]
        family.num_left -= 1
        if not family.num_left:
            self._num_free += 1
            self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        """Start as many families as may run; their first turns not before now."""
        while self._num_free and self._waiting:
            self._num_free -= 1
            for index in self._waiting.popleft().roots:
                arrival_s = self._ready_s + self._turns[index].arrival_s * self._scale
                heapq.heappush(self._heap, Entry(max(now_s, arrival_s), index))


class _Family:
    __slots__ = ("num_left", "roots")

    def __init__(self) -> None:
        self.num_left = 0
        self.roots: list[int] = []


def _families(turns: Sequence[Turn]) -> list[int]:
    """Number each turn's family: turns of one session, and those that come after one another."""
    leader: dict[str, str] = {}

    def find(session: str) -> str:
        leader.setdefault(session, session)
        while leader[session] != session:
            leader[session] = leader[leader[session]]
            session = leader[session]
        return session

    for turn in turns:
        for before, _ in turn.after:
            leader[find(turn.session_id)] = find(before)
    numbers: dict[str, int] = {}
    return [numbers.setdefault(find(turn.session_id), len(numbers)) for turn in turns]
