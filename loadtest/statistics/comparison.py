"""Two variants and one measure: their difference, its interval, and the verdict.

A result depends on which sessions came, and on the run as a whole (the machine's load, where the
first sessions went). Drawing sessions again shows only the first kind of variation, because all
turns of a run share the second. Rounds show the second kind. The interval is the hull of both, and
a verdict needs an interval that excludes "no difference". By sessions alone, two equal variants
whose runs vary by 10 % were called different in 35 % of comparisons of two rounds.

A single round has no interval by rounds: the verdict holds for that run. There is no verdict on
times if the driver itself was late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from loadtest.statistics.bootstrap import (
    Floats,
    Interval,
    Ints,
    by_round,
    difference_of_percentiles,
    percentile,
    ratio_of_means,
)
from loadtest.statistics.measures import Measure
from loadtest.statistics.pairing import Round, pair

Verdict = Literal["less", "more", "within the spread", "blurred"]

MIN_CLUSTERS: Final = 5  # fewer sessions give no useful interval


class Comparison(Struct, frozen=True, kw_only=True):
    """A variant (`arm`) against `baseline`, over the turns that succeeded in both.

    `effect` is the ratio of means, or the difference of percentiles (`kind`). `rounds` has the
    effect of each round. `low` and `high` bound it with 95 % confidence: the hull of `by_session`
    and `by_round` (None: a single round). `ours` and `theirs` are the means or percentiles.
    `blurred` says why there is no verdict.
    """

    measure: str
    unit: str
    better: Literal["less", "more"]
    arm: str
    baseline: str
    kind: Literal["ratio", "difference"]
    ours: float
    theirs: float
    effect: float
    low: float
    high: float
    by_session: Interval
    by_round: Interval | None
    rounds: tuple[float, ...]
    num_turns: int
    num_clusters: int
    num_left_out: int
    verdict: Verdict
    blurred: str = ""

    @property
    def is_better(self) -> bool | None:
        """Return whether the variant did better than the baseline; None: no verdict."""
        if self.verdict not in ("less", "more"):
            return None
        return self.verdict == self.better


def compare(
    measure: Measure,
    arm: str,
    baseline: str,
    rounds: Sequence[Round],
    *,
    blurred: str = "",
    seed: int = 0,
) -> Comparison | None:
    """Compare two variants over their rounds; None: there is nothing to compare.

    Args:
        blurred: Why this measure means little here; "": it is meaningful.
    """
    pairs = pair(measure, rounds)
    kind: Literal["ratio", "difference"] = "ratio" if measure.percentile is None else "difference"
    if not len(pairs.ours) or (kind == "ratio" and pairs.theirs.sum() <= 0):
        return None
    each = tuple(
        _effect(measure, pairs.ours[among], pairs.theirs[among])
        for number in range(len(rounds))
        if (among := pairs.round == number).any()
        and (kind == "difference" or pairs.theirs[among].sum() > 0)
    )
    neutral = 1.0 if kind == "ratio" else 0.0
    effect = _effect(measure, pairs.ours, pairs.theirs)
    sessions = _bound(measure, pairs.ours, pairs.theirs, pairs.cluster, pairs.num_clusters, seed)
    between = by_round(each, neutral)
    both = [sessions, *([between] if between else []), Interval(low=effect, high=effect)]
    hull = Interval(low=min(i.low for i in both), high=max(i.high for i in both))
    if not blurred and pairs.num_clusters < MIN_CLUSTERS:
        blurred = f"only {pairs.num_clusters} sessions in common"
    return Comparison(
        measure=measure.name,
        unit=measure.unit,
        better=measure.better,
        arm=arm,
        baseline=baseline,
        kind=kind,
        ours=_one(measure, pairs.ours),
        theirs=_one(measure, pairs.theirs),
        effect=effect,
        low=hull.low,
        high=hull.high,
        by_session=sessions,
        by_round=between,
        rounds=each,
        num_turns=len(pairs.ours),
        num_clusters=pairs.num_clusters,
        num_left_out=pairs.num_left_out,
        verdict=_judge(neutral, hull, blurred),
        blurred=blurred,
    )


def _one(measure: Measure, values: Floats) -> float:
    if measure.percentile is None:
        return float(values.mean())
    return percentile(values, measure.percentile)


def _effect(measure: Measure, ours: Floats, theirs: Floats) -> float:
    mine, other = _one(measure, ours), _one(measure, theirs)
    return mine / other if measure.percentile is None else mine - other


def _bound(
    measure: Measure,
    ours: Floats,
    theirs: Floats,
    cluster: Ints,
    num_clusters: int,
    seed: int,
) -> Interval:
    if measure.percentile is None:
        return ratio_of_means(ours, theirs, cluster, num_clusters, seed=seed)
    share = measure.percentile
    return difference_of_percentiles(ours, theirs, cluster, num_clusters, share, seed=seed)


def _judge(neutral: float, interval: Interval, blurred: str) -> Verdict:
    if blurred:
        return "blurred"
    if interval.high < neutral:
        return "less"
    if interval.low > neutral:
        return "more"
    return "within the spread"
