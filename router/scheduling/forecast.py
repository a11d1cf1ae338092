"""When a request that waits would have its first token: by the load when it starts, not by now's.

It starts when the prompts in front of it are computed: those in the engine, and those that wait
for the same candidate and go first, being shorter or there before it. Who only waits for room in a
cache waits longer than that, and shorter ones that come later go first, too: by how much the waits
of late were longer than predicted, the next ones are taken to be, too.

Source: Mooncake (arXiv 2407.00079), section 7.4: early rejection by the load of the moment swings
between too much and too little, by the predicted load it does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from policies.view import CandidateId
from router.scheduling.waiting import (
    Choice,
    Group,
    Waiting,
    compute_ms,
    middle_ms,
    read_ms,
    step_of,
)

_DECAY: Final = 0.98  # half of the weight lies on the last 35 waits
_PRIOR_MS: Final = 5_000.0  # waits that were predicted right, to begin with
_STRETCH: Final = (0.25, 4.0)  # least and most
_since = attrgetter("since_s")

Groups = Mapping[Group, Sequence[Waiting]]


class Forecast:
    """Predicts waits, and learns how long they were; for each class on its own."""

    __slots__ = ("_expected_ms", "_waited_ms")

    def __init__(self) -> None:
        self._expected_ms = [_PRIOR_MS, _PRIOR_MS]
        self._waited_ms = [_PRIOR_MS, _PRIOR_MS]

    def stretch(self, *, is_batch: bool) -> float:
        """Return the waits of late over what was predicted of them."""
        least, most = _STRETCH
        return min(most, max(least, self._waited_ms[is_batch] / self._expected_ms[is_batch]))

    def learn(self, waiting: Waiting, now_s: float) -> None:
        """Learn from a wait that is over."""
        if waiting.expected_ms is None:
            return
        for sums, ms in (
            (self._expected_ms, waiting.expected_ms),
            (self._waited_ms, 1e3 * (now_s - waiting.since_s)),
        ):
            sums[waiting.is_batch] = _DECAY * sums[waiting.is_batch] + (1.0 - _DECAY) * ms

    def first_token_ms(
        self, groups: Groups, waiting: Waiting, choice: Choice
    ) -> tuple[float, float]:
        """Predict the time from now to a request's first token, at its best candidate.

        At the one chosen, behind those that go first there; or at another, behind all that wait
        there. And, of this, its wait here as it would be without what was learned. O(groups).
        """
        view = choice.view
        ahead_ms = work_ahead_ms(groups, waiting, choice)
        totals: dict[CandidateId | None, float] = {view.id: ahead_ms}
        own_order = waiting.group.in_time, waiting.rank
        for name, group in groups.items():
            there = name.candidate
            if there != view.id and (name.in_time, name.rank) <= own_order:
                totals[there] = totals.get(there, 0.0) + len(group) * middle_ms(name.step)
        stretch = self.stretch(is_batch=waiting.is_batch)
        return min(
            [
                (cost.ttft_ms + stretch * totals.get(cost.id, 0.0), totals.get(cost.id, 0.0))
                for cost in choice.costs()
            ]
        )


def work_ahead_ms(groups: Groups, waiting: Waiting, choice: Choice) -> float:
    """Sum what those take that will go to a candidate before a request does."""
    own_ms = compute_ms(choice, waiting.num_tokens) + read_ms(choice)
    own = waiting.group.in_time, waiting.rank, step_of(own_ms)
    ahead_ms = 0.0
    for name, group in groups.items():
        if name.candidate != choice.view.id:
            continue
        if not waiting.group.in_time and not name.in_time:  # of those that have waited for too long
            ahead_ms += bisect_left(group, waiting.since_s, key=_since) * middle_ms(name.step)
        elif name.order < own:
            ahead_ms += len(group) * middle_ms(name.step)
        elif name.order == own:
            ahead_ms += bisect_left(group, waiting.since_s, key=_since) * own_ms
    return ahead_ms
