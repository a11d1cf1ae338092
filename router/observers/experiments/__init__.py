"""The observer that gives experiments the results of their requests."""

from __future__ import annotations

from router.experiments.runner import ExperimentRunner
from router.request.observer import Facts, Observer
from router.request.record import record_of


class Results(Observer):
    """Hands the results of assigned requests to their experiments."""

    def __init__(self, experiments: ExperimentRunner) -> None:
        self._experiments = experiments

    def ended(self, facts: Facts) -> None:
        assigned = facts.prompt.assigned
        if assigned is None or facts.placement is None:
            return
        ttft_s = None
        if facts.first_s is not None and facts.ttft_ms is not None:
            ttft_s = facts.first_s - facts.read.inbound.arrived_s
        self._experiments.observe(assigned, record_of(facts), ttft_s)
