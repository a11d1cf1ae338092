"""Metrics of one variant's requests."""

from __future__ import annotations

from router.observers.experiments.metrics import ExperimentMetrics
from router.records.outcome import Outcome
from router.records.record import DecisionRecord


class ArmMetrics:
    """One variant's instruments, looked up once."""

    __slots__ = ("_experiment", "_metrics", "_name", "_tokens", "_ttft")

    def __init__(self, metrics: ExperimentMetrics, experiment: str, arm: str) -> None:
        self._metrics = metrics
        self._experiment, self._name = experiment, arm
        self._ttft = metrics.arm_ttft.labels(experiment, arm)
        self._tokens = {
            kind: metrics.arm_tokens.labels(experiment, arm, kind)
            for kind in ("prompt", "recomputed")
        }

    def count(self, record: DecisionRecord, ttft_s: float | None) -> None:
        assignment = record.assignment
        assert assignment is not None
        labels = self._experiment, self._name
        if assignment.not_counted is not None:
            self._metrics.arm_not_counted.labels(*labels, assignment.not_counted).inc()
            return
        self._metrics.arm_requests.labels(*labels, record.outcome).inc()
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        if record.outcome == Outcome.OK.value:
            cached = record.num_reported_cached_tokens
            if cached is None:
                cached = record.num_predicted_cached_tokens
            self._tokens["prompt"].inc(record.num_prompt_tokens)
            self._tokens["recomputed"].inc(max(0, record.num_prompt_tokens - cached))
