"""Figures of each variant and differences to the baseline, with intervals for one look."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from loadtest.experiments.metrics import METRICS
from loadtest.experiments.observations import SOURCES, Bools, Observations
from loadtest.experiments.records import Records
from loadtest.statistics.effects import Estimate, estimate, mean, quantile
from policies.naming import label_of
from policies.registry import create

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class ArmSummary(Struct, frozen=True, kw_only=True):
    """One variant. `metrics` by name; `against` the baseline: ratio - 1, or a difference."""

    name: str
    policies: dict[str, int]  # label (with parameters) -> requests
    candidates: tuple[str, ...]  # that it sent requests to
    num_units: int
    num_requests: int  # all of them
    num_counted: int
    num_wash_out: int
    states: dict[str, float]  # share of requests by state: exact, degraded, blind
    outcomes: dict[str, int]
    metrics: dict[str, Estimate]
    against: dict[str, Estimate]  # empty for the baseline
    ttft_quantiles: dict[str, Estimate]
    sources: dict[str, float]  # prompt tokens per request, as predicted
    missing_ratio: float  # requests that succeeded without a first-token time (not streamed)


def summarize(
    records: Records, observations: Observations, baseline: str
) -> tuple[ArmSummary, ...]:
    """Return the summary of every variant."""
    return tuple(_summary(records, observations, arm, baseline) for arm in observations.arms)


def _summary(records: Records, observations: Observations, arm: str, baseline: str) -> ArmSummary:
    others = observations.arms if len(observations.arms) == 2 else (arm,)
    window = observations.window(*(others if arm == baseline else (arm, baseline)))
    counted = observations.counted(window)
    is_own = observations.unit_arm[observations.unit] == observations.arms.index(arm)
    own = is_own & counted
    num_counted = int(np.count_nonzero(own))
    has_ttft = own & (observations.denominators["ttft"] > 0)
    outcomes = _counts(records, arm, "outcome")
    states = _counts(records, arm, "coalesce(state, 'unknown')")
    return ArmSummary(
        name=arm,
        policies=_policies(records, arm),
        candidates=tuple(
            row[0]
            for row in records.rows(
                "SELECT DISTINCT candidate FROM chosen WHERE arm = ? AND candidate IS NOT NULL "
                "AND not_counted IS DISTINCT FROM 'stopped' ORDER BY 1",
                [arm],
            )
        ),
        num_units=len(np.unique(observations.unit[own])),
        num_requests=sum(outcomes.values()),
        num_counted=num_counted,
        num_wash_out=int(np.count_nonzero(is_own & observations.is_wash_out)),
        states={name: count / sum(states.values()) for name, count in states.items()},
        outcomes=outcomes,
        metrics={name: _mean(observations, arm, name, counted) for name in METRICS},
        against={
            name: _difference(observations, arm, baseline, name, counted)
            for name in METRICS
            if arm != baseline
        },
        ttft_quantiles={
            name: quantile(
                observations.numerators["ttft"][has_ttft],
                observations.weight[has_ttft],
                observations.unit[has_ttft],
                share,
            )
            for name, share in QUANTILES.items()
        },
        sources={
            name: float(observations.sources[name][own].mean()) if num_counted else 0.0
            for name in SOURCES
        },
        missing_ratio=1 - int(np.count_nonzero(has_ttft)) / num_counted if num_counted else 0.0,
    )


def _mean(observations: Observations, arm: str, metric: str, counted: Bools) -> Estimate:
    own = observations.unit_arm == observations.arms.index(arm)
    sums, counts = observations.sums(metric, counted)
    return mean(sums[own], counts[own])


def _difference(
    observations: Observations, arm: str, baseline: str, metric: str, counted: Bools
) -> Estimate:
    units, is_treated, block = observations.pair(arm, baseline)
    sums, counts = observations.sums(metric, counted)
    is_relative = METRICS[metric].is_relative
    return estimate(
        sums[units], counts[units], is_treated, is_relative=is_relative, block=block
    ).one_look


def _policies(records: Records, arm: str) -> dict[str, int]:
    """Count requests by the label of the policy that placed them; most first."""
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


def _counts(records: Records, arm: str, expression: str) -> dict[str, int]:
    rows = records.rows(
        f"SELECT {expression} AS name, count(*) FROM chosen WHERE arm = ? "
        "GROUP BY 1 ORDER BY 2 DESC, 1",
        [arm],
    )
    return {str(name): int(count) for name, count in rows}
