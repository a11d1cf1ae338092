"""Those that wait, in lines: one for each candidate, and in what order they go.

What must live here: the order. What must not: when a request may go.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from heapq import heappop, heappush, heapreplace, merge
from math import inf
from operator import attrgetter, itemgetter

from policies.view import CandidateId
from router.scheduling.waiting import BATCH_RANK, Group, Waiting, middle_ms

_Place = tuple[bool, int, int, int]
_number = attrgetter("number")
_first = itemgetter(0)


class Lines:
    """All that wait, in groups (see `Group`), each in the order of arrival.

    The line of a candidate is its groups in their order. So to find who goes next takes as long as
    there are candidates, and not as long as there are groups, or requests.

    Args:
        max_wait_s: Of an interactive request, and of one of class batch.
    """

    __slots__ = ("_groups", "_late_at_s", "_lines", "_max_wait_s", "_num_there", "_waiting")

    def __init__(self, max_wait_s: tuple[float, float]) -> None:
        self._max_wait_s = max_wait_s
        self._waiting: set[int] = set()  # numbers
        self._groups: dict[Group, list[Waiting]] = {}  # none empty, each by number
        self._lines: dict[CandidateId | None, list[Group]] = {}  # likewise
        # By where they would go, and whether they are of class batch; none 0.
        self._num_there: Counter[tuple[CandidateId | None, bool]] = Counter()
        self._late_at_s = inf  # no one has waited for too long before

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        """Return whether a request waits."""
        return number in self._waiting

    @property
    def groups(self) -> Mapping[Group, list[Waiting]]:
        """All who wait."""
        return self._groups

    def num_there(self, candidate: CandidateId, *, for_batch: bool) -> int:
        """Count those that would go to a candidate; those of class batch only `for_batch`."""
        num_batch = self._num_there[candidate, True] if for_batch else 0
        return self._num_there[candidate, False] + num_batch

    def add(self, waiting: Waiting) -> None:
        """Let a request wait, with the group that it has."""
        self._waiting.add(waiting.number)
        max_wait_s = self._max_wait_s[waiting.is_batch]
        self._late_at_s = min(self._late_at_s, waiting.since_s + max_wait_s)
        self._join(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Take a request out that waits."""
        self._waiting.remove(waiting.number)
        self._leave(waiting)

    def put(self, waiting: Waiting, group: Group) -> None:
        """Have a request wait in a group."""
        if group != waiting.group:
            self._leave(waiting)
            waiting.group = group
            self._join(waiting)

    def note_late(self, now_s: float) -> None:
        """Have those go first that have waited for too long. O(groups) if there is one more."""
        if now_s < self._late_at_s:
            return
        late: list[Waiting] = []
        self._late_at_s = inf
        for name, group in self._groups.items():
            if name.in_time:
                max_wait_s = self._max_wait_s[name.rank >= BATCH_RANK]
                for waiting in group:
                    if now_s - waiting.since_s < max_wait_s:
                        self._late_at_s = min(self._late_at_s, waiting.since_s + max_wait_s)
                        break
                    late.append(waiting)
        for waiting in late:
            self.put(waiting, waiting.group._replace(in_time=False))

    def in_order(
        self,
        full: Collection[CandidateId | None],
        over: Collection[tuple[int, bool]],
        *,
        behind: bool,
    ) -> Iterator[Waiting]:
        """List who waits, first who is to go first, but those for candidates that are `full`.

        And those that are `over`: of a level, living there or not. `behind`: batch requests that
        have not waited for long enough to go first; else all others. The lines, `full` and `over`
        may change meanwhile.
        """
        walks = [self._walk(candidate, full, over, behind=behind) for candidate in self._lines]
        for _, name, waiting in merge(*walks, key=_first):
            # A walk is one ahead: of what has changed since, its next one knows nothing.
            has_moved = waiting.number not in self._waiting or waiting.group != name
            if not has_moved and name.candidate not in full and name.alike not in over:
                yield waiting

    def _walk(
        self,
        candidate: CandidateId | None,
        full: Collection[CandidateId | None],
        over: Collection[tuple[int, bool]],
        *,
        behind: bool,
    ) -> Iterator[tuple[_Place, Group, Waiting]]:
        """List who waits for one candidate, each with its place and its group.

        `heads` are the first ones of groups, of all that may have the next.
        """
        heads: list[tuple[_Place, Group, Waiting]] = []
        last = Group(candidate, True, BATCH_RANK, -1, False) if behind else None
        while candidate not in full:
            line = self._lines.get(candidate, ())
            index = 0 if last is None else bisect_right(line, last)
            while index < len(line) and (behind or not line[index].is_behind):
                if heads and _least_place(line[index]) > heads[0][0]:
                    break
                last = line[index]
                head = self._groups[last][0]
                heappush(heads, (_place(last, head), last, head))
                index += 1
            if not heads:
                return
            _, name, waiting = heads[0]
            if name.alike in over:
                heappop(heads)
                continue
            yield heads[0]
            group = self._groups.get(name, ())
            index = bisect_right(group, waiting.number, key=_number)
            if index < len(group):
                heapreplace(heads, (_place(name, group[index]), name, group[index]))
            else:
                heappop(heads)

    def ends(
        self, candidates: Collection[CandidateId | None]
    ) -> tuple[Iterator[tuple[float, CandidateId, Group]], dict[CandidateId, float]]:
        """List the groups that wait for candidates, and what is computed before their ends are.

        In ms, with the end itself, the most first; and what all take that wait there. The lines
        may change meanwhile.
        """
        lines_ms: dict[CandidateId, float] = {}
        walks: list[Iterator[tuple[float, CandidateId, Group]]] = []
        for candidate in candidates:
            line = self._lines.get(candidate)
            if candidate is None or line is None:
                continue
            if not line[0].in_time:  # among late ones the order of groups is not that of requests
                line = sorted(line, key=lambda name: _place(name, self._groups[name][-1]))
            lines_ms[candidate] = sum(
                len(self._groups[name]) * middle_ms(name.step) for name in line
            )
            walks.append(self._ends_of(candidate, line[::-1], lines_ms[candidate]))
        return merge(*walks, key=_first, reverse=True), lines_ms

    def _ends_of(
        self, candidate: CandidateId, line: list[Group], line_ms: float
    ) -> Iterator[tuple[float, CandidateId, Group]]:
        ahead_ms = line_ms
        for name in line:
            took_ms = len(self._groups.get(name, ())) * middle_ms(name.step)
            yield ahead_ms, candidate, name
            ahead_ms -= took_ms

    def _join(self, waiting: Waiting) -> None:
        name = waiting.group
        group = self._groups.get(name)
        if group is None:
            self._groups[name] = [waiting]
            insort(self._lines.setdefault(name.candidate, []), name)
        else:
            insort(group, waiting, key=_number)
        self._num_there[name.candidate, waiting.is_batch] += 1

    def _leave(self, waiting: Waiting) -> None:
        name = waiting.group
        group = self._groups[name]
        del group[bisect_left(group, waiting.number, key=_number)]
        if not group:
            del self._groups[name]
            line = self._lines[name.candidate]
            del line[bisect_left(line, name)]
            if not line:
                del self._lines[name.candidate]
        there = name.candidate, waiting.is_batch
        self._num_there[there] -= 1
        if not self._num_there[there]:
            del self._num_there[there]


def _place(name: Group, waiting: Waiting) -> _Place:
    """Return a request's place in the order: the least goes first."""
    if not name.in_time:
        return False, 0, 0, waiting.number
    return *name.order, waiting.number


def _least_place(name: Group) -> tuple[bool, int, int]:
    """Return what no request of a group has a lesser place than."""
    return name.order if name.in_time else (False, 0, 0)
