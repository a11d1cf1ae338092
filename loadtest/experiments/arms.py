"""What each variant did, with intervals that hold at one look; and against the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from loadtest.experiments.metrics import METRICS
from loadtest.experiments.observations import SOURCES, Bools, Observations
from loadtest.experiments.records import Records
from loadtest.statistics.resampling import (
    UNKNOWN,
    Estimate,
    Resampled,
    difference,
    quantile,
    resample,
)
from policies.naming import label_of
from policies.registry import create

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class ArmSummary(Struct, frozen=True, kw_only=True):
    """One arm. `metrics` by name, `against` the baseline: ratio - 1, or a difference."""

    name: str
    policies: dict[str, int]  # label (with parameters) -> requests
    candidates: tuple[str, ...]  # that it sent requests to
    num_units: int
    num_requests: int  # all of them
    num_counted: int
    num_wash_out: int
    states: dict[str, float]  # share of requests decided so: exact, degraded, blind
    outcomes: dict[str, int]
    metrics: dict[str, Estimate]
    against: dict[str, Estimate]  # empty for the baseline
    ttft_quantiles: dict[str, Estimate]
    sources: dict[str, float]  # prompt tokens per request, as predicted
    missing_ratio: float  # requests that succeeded without a first-token time (not streamed)


def summarize(
    records: Records,
    observations: Observations,
    baseline: str,
    *,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> tuple[ArmSummary, ...]:
    """Sum up every arm; `advance` is called once for each arm and metric."""
    made = []
    for index, arm in enumerate(observations.arms):
        alone = observations.arms if len(observations.arms) == 2 else (arm,)
        counted = observations.counted(
            observations.window(*(alone if arm == baseline else (arm, baseline)))
        )
        own, against = {}, {}
        for number, name in enumerate(METRICS):
            mixed = seed + 1009 * index + number  # arms and metrics are resampled apart
            own[name] = _resampled(observations, arm, name, counted, mixed)
            if arm != baseline:
                held = _resampled(observations, baseline, name, counted, mixed + 500)
                relative = METRICS[name].is_relative
                against[name] = difference(held, own[name], is_relative=relative)
            advance()
        made.append(_summary(records, observations, arm, counted, own, against))
    return tuple(made)


def _resampled(
    observations: Observations, arm: str, metric: str, counted: Bools, seed: int
) -> Resampled | None:
    of_arm = observations.unit_arm == observations.arms.index(arm)
    sums, counts = observations.sums(metric, counted)
    return resample(sums[of_arm], counts[of_arm], seed)


def _summary(
    records: Records,
    observations: Observations,
    arm: str,
    counted: Bools,
    own: dict[str, Resampled | None],
    against: dict[str, Estimate],
) -> ArmSummary:
    is_own = observations.unit_arm[observations.unit] == observations.arms.index(arm)
    counted = is_own & counted
    num_counted = int(np.count_nonzero(counted))
    outcomes = _shares(records, arm, "outcome")
    return ArmSummary(
        name=arm,
        policies=_policies(records, arm),
        candidates=tuple(
            row[0]
            for row in records.rows(
                "SELECT DISTINCT candidate FROM chosen WHERE arm = ? AND candidate IS NOT NULL "
                "AND coalesce(not_counted, 'wash_out') = 'wash_out' ORDER BY 1",
                [arm],
            )
        ),
        num_units=len(np.unique(observations.unit[counted])),
        num_requests=sum(outcomes.values()),
        num_counted=num_counted,
        num_wash_out=int(np.count_nonzero(is_own & observations.is_wash_out)),
        states=_ratios(_shares(records, arm, "coalesce(state, 'unknown')")),
        outcomes=outcomes,
        metrics={
            name: value.estimate if value is not None else UNKNOWN for name, value in own.items()
        },
        against=against,
        ttft_quantiles=_quantiles(observations, counted),
        sources={
            name: float(observations.sources[name][counted].mean()) if num_counted else 0.0
            for name in SOURCES
        },
        missing_ratio=_missing(observations, counted),
    )


def _policies(records: Records, arm: str) -> dict[str, int]:
    """Count requests by the policy that placed them, as labels; most first."""
    rows = records.rows(
        "SELECT policy, params, count(*) FROM chosen WHERE arm = ? "
        "AND not_counted IS DISTINCT FROM 'stopped' GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
        [arm],
    )
    counts: dict[str, int] = {}
    for name, params, count in rows:
        label = _label(str(name), str(params))
        counts[label] = counts.get(label, 0) + int(count)
    return counts


def _label(name: str, params: str) -> str:
    try:
        return label_of(create(name, msgspec.json.decode(params)))
    except (ValueError, TypeError):  # a policy of another version
        return f"{name} {params}"


def _quantiles(observations: Observations, counted: Bools) -> dict[str, Estimate]:
    has = counted & (observations.denominators["ttft"] > 0)
    values = observations.numerators["ttft"][has]
    weights, unit = observations.weight[has], observations.unit[has]
    return {name: quantile(values, weights, unit, q) for name, q in QUANTILES.items()}


def _missing(observations: Observations, counted: Bools) -> float:
    if not np.any(counted):
        return 0.0
    has = observations.denominators["ttft"][counted] > 0
    return float(1 - np.mean(has))


def _shares(records: Records, arm: str, expression: str) -> dict[str, int]:
    rows = records.rows(
        f"SELECT {expression} AS name, count(*) FROM chosen WHERE arm = ? "
        "GROUP BY 1 ORDER BY 2 DESC, 1",
        [arm],
    )
    return {str(name): int(count) for name, count in rows}


def _ratios(counts: dict[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}
