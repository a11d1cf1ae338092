"""Pairs of turns of two variants, and clusters of sessions that are drawn together.

Both variants ran the same workload, so a turn is paired with itself by session, number and round.
Only complete pairs count. A session's turns depend on each other, and so do a session and its
sub-agents: they are one cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from loadtest.results import TurnResult
from loadtest.statistics.bootstrap import Floats, Ints
from loadtest.statistics.measures import Measure
from loadtest.whole_sessions import roots, whole_sessions
from loadtest.workload import TurnKey


class Round(Struct, frozen=True, kw_only=True):
    """The turns of two variants in one round; `is_complete`: both ran to their ends."""

    ours: Sequence[TurnResult]
    theirs: Sequence[TurnResult]
    is_complete: bool = True


class Pairs(Struct, frozen=True, kw_only=True):
    """Paired values, shape (num_pairs,) each.

    `cluster` is in [0, num_clusters); `round` is the index of the round given. `num_left_out`
    counts the turns of either variant without a pair: one of the two failed, did not come, or has
    no value.
    """

    ours: Floats
    theirs: Floats
    cluster: Ints
    round: Ints
    num_clusters: int
    num_left_out: int


def pair(measure: Measure, rounds: Sequence[Round]) -> Pairs:
    """Pair the turns of each round.

    Sessions of one name in several rounds are one cluster, because the same workload ran again.
    Warm-up turns do not count. A measure that counts failures counts a turn that one variant never
    sent as failed, if the round is complete.
    """
    ours: list[float] = []
    theirs: list[float] = []
    clusters: list[int] = []
    numbers: list[int] = []
    known: dict[str, int] = {}
    num_left_out = 0
    for number, both in enumerate(rounds):
        mine, other = _by_session(both) if measure.value is None else _by_turn(measure, both)
        root_of = roots({session_id for session_id, _ in (*mine, *other)})
        for key in dict.fromkeys((*mine, *other)):
            left, right = mine.get(key), other.get(key)
            if left is None or right is None:
                num_left_out += 1
                continue
            root = root_of[key[0]]
            ours.append(left)
            theirs.append(right)
            clusters.append(known.setdefault(root, len(known)))
            numbers.append(number)
    return Pairs(
        ours=np.array(ours, dtype=np.float64),
        theirs=np.array(theirs, dtype=np.float64),
        cluster=np.array(clusters, dtype=np.int64),
        round=np.array(numbers, dtype=np.int64),
        num_clusters=len(known),
        num_left_out=num_left_out,
    )


def num_differing_tokens(runs: Sequence[Iterable[TurnResult]]) -> tuple[int, int]:
    """Count turns whose prompt, and turns whose reply, had another length in another run.

    (0, 0): the same work everywhere. Turns that failed or never came are errors and do not count.
    Lengths that were not reported are not compared.
    """
    seen: tuple[dict[TurnKey, int], dict[TurnKey, int]] = ({}, {})
    differing: tuple[set[TurnKey], set[TurnKey]] = (set(), set())
    for run in runs:
        for turn in run:
            if turn.error is not None or turn.is_warm_up:
                continue
            key = (turn.session_id, turn.number)
            lengths = (turn.num_prompt_tokens, turn.num_output_tokens)
            for length, first, others in zip(lengths, seen, differing, strict=True):
                if length is not None and first.setdefault(key, length) != length:
                    others.add(key)
    return len(differing[0]), len(differing[1])


Values = dict[TurnKey, float | None]


def _by_turn(measure: Measure, both: Round) -> tuple[Values, Values]:
    """Return the value of each turn of both variants; None: there is none."""
    mine, other = _by_key(both.ours), _by_key(both.theirs)
    keys = dict.fromkeys((*mine, *other))
    first, second = (
        {key: _value(measure, turns.get(key), both.is_complete) for key in keys}
        for turns in (mine, other)
    )
    return first, second


def _by_session(both: Round) -> tuple[Values, Values]:
    """Return the time of each session that had the same turns in both variants."""
    mine, other = whole_sessions(both.ours), whole_sessions(both.theirs)
    same = {
        root
        for root, found in mine.items()
        if root in other and other[root].num_turns == found.num_turns
    }
    first, second = (
        {(root, 0): found.took_s if root in same else None for root, found in of_it.items()}
        for of_it in (mine, other)
    )
    return first, second


def _by_key(turns: Iterable[TurnResult]) -> dict[TurnKey, TurnResult]:
    return {(turn.session_id, turn.number): turn for turn in turns if not turn.is_warm_up}


def _value(measure: Measure, turn: TurnResult | None, is_complete: bool) -> float | None:
    if turn is None:
        return 0.0 if measure.counts_failures and is_complete else None
    if turn.error is not None and not measure.counts_failures:
        return None
    return None if measure.value is None else measure.value(turn)
