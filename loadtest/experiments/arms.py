"""Figures of each variant and differences to the baseline, with intervals for one look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.metrics import METRICS
from loadtest.experiments.observations import SOURCES, Bools, Observations
from loadtest.experiments.records import Request
from loadtest.statistics.effects import Estimate, estimate, mean, quantile

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


def summarize(observations: Observations, baseline: str) -> tuple[ArmSummary, ...]:
    """Return the summary of every variant."""
    return tuple(_summary(observations, arm, baseline) for arm in observations.arms)


def _summary(observations: Observations, arm: str, baseline: str) -> ArmSummary:
    others = observations.arms if len(observations.arms) == 2 else (arm,)
    window = observations.window(*(others if arm == baseline else (arm, baseline)))
    counted = observations.counted(window)
    is_own = observations.unit_arm[observations.unit] == observations.arms.index(arm)
    own = is_own & counted
    num_counted = int(np.count_nonzero(own))
    has_ttft = own & (observations.denominators["ttft"] > 0)
    requests = [each for each in observations.requests if _arm(each) == arm]
    placed = [each for each in requests if each.not_counted != "stopped"]
    states = Counter(each.state for each in requests)
    return ArmSummary(
        name=arm,
        policies=_counts(each.policy for each in placed),
        candidates=tuple(sorted({each.candidate for each in placed if each.candidate})),
        num_units=len(np.unique(observations.unit[own])),
        num_requests=len(requests),
        num_counted=num_counted,
        num_wash_out=int(np.count_nonzero(is_own & observations.is_wash_out)),
        states={name: count / len(requests) for name, count in states.items()},
        outcomes=_counts(each.outcome for each in requests),
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


def _arm(request: Request) -> str | None:
    return request.assignment.arm if request.assignment is not None else None


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Count names; most first."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
