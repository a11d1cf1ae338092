"""Differences between policies, with their spread: what may be said, and what may not.

The same sessions ran under every policy, so policies are compared session by session (sub-agents
with their parent): the ratio of two totals, and the interval that this ratio keeps to when
sessions are drawn anew (bootstrap, 95 %). A ratio whose interval holds 1 is "within the spread".
Sessions of one run share queues, so the interval tells how much hangs on a few sessions; it does
not stand in for repetitions, which `--repeat` adds. Times measured while the driver itself was late
are no ground for a verdict at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import numpy as np
from msgspec import Struct

from loadtest.results import TurnResult

_NUM_DRAWS: Final = 2000
_INTERVAL: Final = (2.5, 97.5)  # percent

Verdict = Literal["less", "more", "within the spread", "blurred"]
Measure = Literal["mean TTFT", "mean turn", "recomputed tokens"]


class Comparison(Struct, frozen=True, kw_only=True):
    """`policy` against `baseline`: ratio of totals, its 95 % interval, and each repetition's.

    `blurred`: the machine was too busy for this measure to mean much.
    """

    measure: Measure
    policy: str
    baseline: str
    ratio: float
    low: float
    high: float
    repetitions: tuple[float, ...]
    blurred: bool = False

    @property
    def verdict(self) -> Verdict:
        """Say whether the difference is more than spread: interval and every repetition agree."""
        if self.blurred:
            return "blurred"
        if self.high < 1 and max(self.repetitions) < 1:
            return "less"
        if self.low > 1 and min(self.repetitions) > 1:
            return "more"
        return "within the spread"


def compare(
    measure: Measure,
    policy: str,
    baseline: str,
    ours: Sequence[Iterable[TurnResult]],
    theirs: Sequence[Iterable[TurnResult]],
    *,
    blurred: bool = False,
    seed: int = 0,
) -> Comparison | None:
    """Compare the repetitions of two policies, shape (num_repetitions,) each, in the same order.

    Only turns that succeeded under both count. None: there is nothing to compare.
    """
    sums: list[tuple[float, float]] = []  # one per session
    repetitions: list[float] = []
    for our_results, their_results in zip(ours, theirs, strict=True):
        pairs = _by_session(MEASURES[measure], our_results, their_results)
        our_total = sum(pair[0] for pair in pairs)
        their_total = sum(pair[1] for pair in pairs)
        if their_total <= 0:
            return None
        repetitions.append(our_total / their_total)
        sums.extend(pairs)
    if not sums:
        return None
    totals = np.array(sums)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(_NUM_DRAWS, len(sums)))
    resampled = totals[drawn].sum(axis=1)
    ratios = resampled[:, 0] / np.maximum(resampled[:, 1], 1e-12)
    low, high = np.percentile(ratios, _INTERVAL)
    return Comparison(
        measure=measure,
        policy=policy,
        baseline=baseline,
        ratio=float(totals[:, 0].sum() / totals[:, 1].sum()),
        low=float(low),
        high=float(high),
        repetitions=tuple(repetitions),
        blurred=blurred,
    )


def num_differing_prompts(runs: Sequence[Iterable[TurnResult]]) -> int:
    """Count turns whose prompt or reply had another length under another policy; 0: same bytes.

    Turns that failed or never came are not counted here: they are errors.
    """
    seen: dict[tuple[str, int], tuple[int | None, int | None]] = {}
    differing: set[tuple[str, int]] = set()
    for run in runs:
        for turn in run:
            if turn.error is not None:
                continue
            key = (turn.session_id, turn.number)
            lengths = (turn.num_prompt_tokens, turn.num_output_tokens)
            if seen.setdefault(key, lengths) != lengths:
                differing.add(key)
    return len(differing)


TIMES: Final[frozenset[Measure]] = frozenset({"mean TTFT", "mean turn"})
MEASURES: Final[dict[Measure, Callable[[TurnResult], float]]] = {
    "mean TTFT": lambda turn: turn.ttft_s or 0.0,
    "mean turn": lambda turn: turn.total_s,
    "recomputed tokens": lambda turn: float(turn.num_recomputed_tokens),
}


def _by_session(
    measure: Callable[[TurnResult], float],
    ours: Iterable[TurnResult],
    theirs: Iterable[TurnResult],
) -> list[tuple[float, float]]:
    """Sum both sides over the turns they share, per session; a sub-agent counts as its parent."""
    found = {(turn.session_id, turn.number): measure(turn) for turn in ours if turn.error is None}
    sums: dict[str, tuple[float, float]] = {}
    for turn in theirs:
        mine = found.get((turn.session_id, turn.number))
        if turn.error is not None or mine is None:
            continue
        root = turn.session_id.partition(".")[0]
        before = sums.get(root, (0.0, 0.0))
        sums[root] = (before[0] + mine, before[1] + measure(turn))
    return list(sums.values())
